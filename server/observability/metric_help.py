"""What each of our metrics is, by its name: without the prefix, and of a counter without _total."""

from penstock.server.observability.step_window import WINDOW_S

# The scheduler's statistics have these names with _total.
SCHEDULER_COUNTERS = {
    "recomputed_tokens": "Tokens computed a second time because of preemptions and engine restarts",
    "preemptions": "Sequences preempted",
    "invalid_logits": "Answers ended with an error because the model's logits were NaN or infinite",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "encoder_queries": "Images of requests that began to run",
    "encoder_hits": "Images of these that were not encoded for them: the prefix cache had them, or "
    "an equal one's rows were there",
    "encoder_seconds": "Time in which images were encoded",
    "prefix_stateless_tokens": "Prompt tokens whose keys and values were found, but no recurrent "
    "state after them",
}
# Of each tier, after kv_offload_.
TIER_COUNTERS = {
    "hit_blocks": "Blocks that were loaded for prompts, by where they were",
    "read_bytes": "Bytes of blocks read from there",
    "read_seconds": "Time of reading them, of a disk summed over threads",
    "written_bytes": "Bytes of blocks written there",
    "write_seconds": "Time of writing them",
    "unwritten_blocks": "Blocks whose memory was used for others before they were written",
    "removed_blocks": "Blocks that this server removed to stay within the limit",
    "damaged_blocks": "Blocks that were missing, cut off or changed, and that were computed again",
    "failed_writes": "Blocks that could not be written",
}
TIER_GAUGES = {
    "blocks": "Blocks of this model that can be read from there",
    "bytes": "Bytes that blocks take there; of a disk all files in --kv-offload-dir, when it was "
    "last looked at",
}
_RECENT = f"the last {WINDOW_S} seconds"
_UTILIZATION = (
    f"Share of the hardware's peak {{}} that the steps of {_RECENT} had to use while they ran; 0 "
    "if no step ran"
)
HELP = {
    # Of requests.
    "time_to_first_token_seconds": "From the arrival of a request to the first token of an answer",
    "time_per_output_token_seconds": "Mean time per token of an answer, after the first token",
    "inter_token_latency_seconds": "Time between two tokens of an answer",
    "request_latency_seconds": "From the arrival of a request to its last token",
    "queue_time_seconds": "From the arrival of a request to the first step of an answer",
    "prefill_time_seconds": "From the first step of an answer to its first token",
    "decode_time_seconds": "From the first token of an answer to its last",
    "inference_time_seconds": "From the first step of an answer to its last token",
    "request_preemptions": "How often an answer that the engine ended was preempted",
    "request_prompt_tokens": "Tokens of one accepted prompt",
    "request_computed_prompt_tokens": "Tokens of one prompt that were not in the prefix cache at "
    "its first step",
    "request_answers": "Answers that a request asks for per accepted prompt (n)",
    "request_max_tokens": "Most tokens that an answer to an accepted prompt may have (max_tokens)",
    "request_generated_tokens": "Tokens of one answer that finished",
    "prompt_tokens": "Prompt tokens of accepted requests",
    "cached_prompt_tokens": "Prompt tokens whose keys and values were already in the KV cache",
    "generated_tokens": "Tokens sampled",
    "requests": "Requests that the engine got and that have ended, by outcome",
    "http_responses": "HTTP responses by status",
    "predicted_time_to_first_token_seconds": "TTFT expected at the arrival of requests with a "
    "target that were accepted",
    "ttft_prediction_error_seconds": "Distance of the measured TTFT from the expected one",
    "slo_attained": "Targets of answers (tpot) and of their first tokens (ttft), by what came of "
    "them",
    # Of steps.
    "batch_size_sequences": "Sequences in one step",
    "step_tokens": "Tokens in one step, of prompts and of answers",
    "step_progress_tokens": "Prompt tokens computed and answer tokens sampled in one step",
    "model_bytes": "The fewest bytes that the steps had to read",
    "model_flops": "Floating-point operations of the steps",
    "predicted_steps": "Steps whose time was predicted at their launch",
    "step_predicted_seconds": "Predicted time of these steps",
    "step_measured_seconds": "Measured time of these steps, from the end of one to that of the "
    "next",
    "step_prediction_error_ratio": "Mean relative error of the predicted time of the latest steps",
    "spec_decode_drafts": "Rows of steps that had drafts of the next tokens, by where these were "
    "found",
    "spec_decode_draft_tokens": "Drafts that were verified, by where they were found",
    "spec_decode_accepted_tokens": "Drafts that were accepted, by where they were found",
    "spec_decode_accepted_tokens_per_pos": "Drafts that were accepted, by where they were found "
    "and their position in their row",
    "spec_decode_reached_tokens_per_pos": "Drafts all before which were accepted, by where they "
    "were found and their position in their row",
    # Of the scheduler and its memory.
    **SCHEDULER_COUNTERS,
    "running_sequences": "Sequences that run",
    "waiting_sequences": "Sequences that wait in the queue",
    "kv_used_blocks": "KV blocks that sequences hold",
    "kv_idle_blocks": "KV blocks that no sequence holds and whose content can still be found",
    "kv_free_blocks": "KV blocks without content",
    "kv_cache_usage_ratio": "Share of the KV blocks that sequences hold; with windows, in the "
    "fullest pool",
    "kv_block_size_tokens": "Tokens of a KV block",
    "recurrent_states": "Recurrent states: used by sequences, idle as snapshots, or free",
    "kv_window_blocks": "KV blocks of the layers with a sliding window, by its tokens and their "
    "state",
    "fairness_jain_index": "Jain's index of what was computed lately for keys that have to wait: "
    "1 is equal",
    "kv_offload_query_tokens": "Prompt tokens looked up below the KV cache, as they were not in it",
    "kv_offload_hit_tokens": "Prompt tokens loaded from there",
    "kv_offload_misses": "Prompts of which nothing, or not all that was found, was loaded, by "
    "reason: absent, slower than computing, unreadable, or late (a load took too long, and for "
    "30 s none begins)",
    **{f"kv_offload_{name}": text for name, text in (TIER_COUNTERS | TIER_GAUGES).items()},
    "lora_requests_info": "With --enable-lora, when it was so: the adapters with a request that "
    "runs, and with one that waits",
    "lora_adapter_requests": "With --enable-lora: requests that named an adapter, since it was "
    "loaded",
    # Of the engine's process.
    "engine_busy_seconds": "Time in which the engine ran a step",
    "engine_idle_ratio": f"Share of {_RECENT} in which the engine ran no step",
    "engine_last_step_age_seconds": "Time since the engine's last step, or since work arrived if "
    "later; 0 without work",
    "engine_restarts": "Engine processes that were replaced, by what ended them",
    "resumed_requests": "Requests given to another engine process after the one before had ended",
    "quarantined_requests": "Requests that ended with an error because the engine process ended "
    "twice with them",
    "pipeline_bubble_ratio": f"Share of the steps' time in {_RECENT} in which a stage of the "
    "pipeline computed nothing, the mean of all stages",
    "startup_seconds": "Time of each phase of the start",
    # Of the model and the hardware.
    "quantization_kl_divergence": "Mean KL divergence, in nats, of the quantized model from the "
    "unquantized one",
    "quantization_top1_agreement_ratio": "Share of a text's tokens after which both models find "
    "the same token likeliest",
    "measured_peaks_are_doubtful": "1 if the measured peaks were measured beside other programs, "
    "so that utilization of them may read too high; until they are measured again, when nothing "
    "else runs",
    "peak_bandwidth_bytes_per_second": "The hardware's peak bandwidth",
    "peak_flops_per_second": "The hardware's peak flops",
    # The peak is that of memory.
    "model_bandwidth_utilization_ratio": f"{_UTILIZATION.format('bandwidth')}; above 1 where a "
    "model fits in the processor's cache, which is faster",
    "model_flops_utilization_ratio": _UTILIZATION.format("flops"),
}

"""Fields that other servers serve and we do not: refused by name, as they would change the answer.

What would not change it (a provider's accounting, hints for a cache, the padding of a stream) is
not here: it is accepted, as is any unknown field. Some that have no effect are reported in the log.
"""

import logging

logger = logging.getLogger("penstock")

# Field -> the values that change nothing.
NOT_SERVED: dict[str, tuple[object, ...]] = {
    # vLLM's.
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "kv_transfer_params": ({},),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "repetition_detection": ({},),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    # SGLang's.
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "lora_path": ("",),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": ("", []),
    "stream_reasoning": (True,),
    # llama.cpp's.
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "lora": ([],),
    "mirostat": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "samplers": (),
    "t_max_predict_ms": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # Text Generation Inference's, and those of providers of open models.
    "adapter_id": ("",),
    "do_sample": (True,),
    "enable_thinking": (),
    "num_beams": (1,),
    "thinking": (),
    "thinking_budget": (),
    "typical": (1,),
}

# The advice in place of it, where that is not to leave it out.
HINTS = {
    "do_sample": "use temperature: 0 for greedy decoding",
    "enable_thinking": "put it in chat_template_kwargs",
    "function_call": "use /v1/chat/completions",
    "functions": "use /v1/chat/completions",
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "repeat_penalty": "use repetition_penalty",
    "return_prompt_text": "use return_token_ids and POST /detokenize",
    "thinking": "put enable_thinking in chat_template_kwargs",
}

# vLLM's, for plugins that this server does not have, and for templates of other models.
UNUSED = ("documents", "vllm_xargs")
# Clients choose names of variables: without a limit they could fill the log and the memory.
_MAX_REPORTED = 100
_reported: set[str] = set()


def report_unused(field: str, why: str) -> None:
    """Once for each field."""
    field = field[:100]
    if field in _reported or len(_reported) >= _MAX_REPORTED:
        return
    _reported.add(field)
    logger.warning("%r in a request had no effect: %s (reported once)", field, why)

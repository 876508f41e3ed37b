"""Tells what to do instead of what `vllm bench` has and `penstock bench` lacks.

A command line that was written for vLLM is told from a mistake: its flags, data sets and backends
are refused by name.
"""

from penstock.loadtest.command_line import with_dashes

_LORA = "each adapter is a model; measure one with --model"
_PLOT = "use --report FILE or --plot-dir DIR, which draw the timeline and more"
_TEXT = "prompts are text"
_GENERATION = "only completions and chat are measured"
_FLAGS = {
    "--use-beam-search": "beam search is not measured; leave it out",
    "--profile": "start the profiler on the server",
    "--tokenizer-mode": "give --tokenizer a directory with a tokenizer.json",
    "--trust-remote-code": "no code of a tokenizer is run; leave it out",
    "--skip-tokenizer-init": "leave out --tokenizer; then none is read",
    "--self-timed": "a trace is replayed at its own times unless --request-rate is given",
    "--no-self-timed": "give --request-rate, which replaces a trace's times",
    "--probe-request-rate": "run a second penstock bench at the same time, with --request-rate",
    "--no-oversample": "leave it out: no request is sent twice",
    "--no-stream": "leave it out: files are read from disk",
    "--skip-chat-template": "use --backend openai for bare texts, or openai-chat for conversations",
    "--chat-template-kwargs": "use --extra-body '{\"chat_template_kwargs\": {...}}'",
    "--enable-multimodal-chat": _TEXT,
    "--no-reranker": _GENERATION,
    "--config": "give the flags on the command line",
}
_FLAG_PREFIXES = {
    **dict.fromkeys(("--lora-", "--max-loras"), _LORA),
    **dict.fromkeys(("--plot-timeline", "--plot-dataset-stats", "--timeline-itl-"), _PLOT),
    **dict.fromkeys(("--random-mm-", "--custom-ensure-", "--asr-"), _TEXT),
    "--random-batch-size": _GENERATION,
    "--hf-": "save the set as JSONL and use --dataset-name custom",
    "--sonnet-": "use --dataset-name prefix_repetition, or a custom file",
    **dict.fromkeys(
        ("--spec-bench-", "--speed-bench-", "--blazedit-"),
        "save its prompts as JSONL and use --dataset-name custom",
    ),
    "--bfcl-": "tool calls are not measured; use --extra-body to send tools with every request",
    "--timed-trace-": "use --dataset-name mooncake: times in ms, blocks of 512 tokens",
}
_DATASETS = {
    "sonnet": _FLAG_PREFIXES["--sonnet-"],
    "hf": _FLAG_PREFIXES["--hf-"],
    "spec_bench": _FLAG_PREFIXES["--spec-bench-"],
    "speed_bench": _FLAG_PREFIXES["--speed-bench-"],
    "timed_trace": _FLAG_PREFIXES["--timed-trace-"],
    "txt-slices": "cut the text into a custom file",
    **dict.fromkeys(("random-mm", "custom_audio", "custom_image", "custom_mm"), _TEXT),
    "random-rerank": _GENERATION,
}
_BACKENDS = {
    **dict.fromkeys(
        (
            *("openai-audio", "openai-embeddings", "openai-embeddings-chat"),
            *("openai-embeddings-clip", "openai-embeddings-vlm2vec", "infinity-embeddings"),
            *("infinity-embeddings-clip", "vllm-pooling", "vllm-rerank"),
        ),
        _GENERATION,
    ),
    "tgi": "its server has OpenAI's API too: use openai-chat",
    "tensorrt-llm": "its server has OpenAI's API too: use openai",
    "deepspeed-mii": "use openai with its RESTful API",
    "scalellm": "use openai",
}
_VALUES = {"--dataset-name": _DATASETS, "--backend": _BACKENDS, "--endpoint-type": _BACKENDS}
# Commands of `vllm bench` that measure an engine in the same process, and not a server.
_COMMANDS = ("latency", "throughput", "startup", "mm-processor", "sweep")


def advice_on_flag(flag: str) -> str | None:
    """Says what to do instead of a flag of vLLM; None for any other flag."""
    return _FLAGS.get(flag) or next(
        (text for start, text in _FLAG_PREFIXES.items() if flag.startswith(start)), None
    )


def refusal(argv: list[str]) -> str | None:
    """A sentence on the first argument that is vLLM's and not supported; None without one."""
    if argv[:1] and argv[0] in _COMMANDS:
        hint = "--sweep searches for the highest rate" if argv[0] == "sweep" else _GENERATION
        return f"vllm bench {argv[0]} has no counterpart: {hint}; leave out {argv[0]!r}"
    typed = with_dashes(argv)
    for argument, following in zip(typed, [*typed[1:], ""], strict=True):
        flag, has_value, value = argument.partition("=")
        advice = advice_on_flag(flag)
        if advice is not None:
            return f"{flag} of vllm bench serve is not supported: {advice}"
        value = value if has_value else following
        if advice := _VALUES.get(flag, {}).get(value):
            return f"{flag} {value} of vllm bench serve is not supported: {advice}"
    return None

"""Flags of vLLM that a command line may bring along.

Underscores are hyphens, as there. A flag that asks for what is so anyway is taken out, with a line
that says why it has no effect; others are refused by name, with what to do instead.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from penstock.scheduler.errors import InvalidConfig


class _Already(NamedTuple):
    """why: it has no effect. values: those with which that is so; None for any, empty where the
    flag takes none."""

    why: str
    values: tuple[str, ...] | None = ()


_THE_MODEL = "MODEL"  # stands for a value that the command line has twice
_LOGGED = _Already("requests are logged only with --log-requests")
_COMPILED = _Already("what a step runs is compiled or captured as the device allows", None)
_ENFORCED = _Already("structured output is always on, by one library", None)
ALREADY: dict[str, _Already] = {
    "--enable-auto-tool-choice": _Already("tool calls are parsed without it"),
    "--trust-remote-code": _Already("no code of a model is run, whoever trusts it"),
    "--enable-chunked-prefill": _Already("prefill is always chunked"),
    "--async-scheduling": _Already("the scheduler runs ahead of a GPU by itself"),
    "--disable-log-stats": _Already("metrics cost little and are always on"),
    "--disable-log-requests": _LOGGED,
    "--no-enable-log-requests": _LOGGED,
    "--disable-uvicorn-access-log": _LOGGED,
    "--max-log-len": _Already("texts are never logged", None),
    "--enable-request-id-headers": _Already("each answer has an x-request-id"),
    "--enable-prompt-tokens-details": _Already("usage always has prompt_tokens_details"),
    "--enable-ssl-refresh": _Already("a renewed certificate is used without it"),
    "--swap-space": _Already("preempted sequences are recomputed, not swapped", None),
    "--max-logprobs": _Already("the limit is 20", tuple(map(str, range(21)))),
    "--data-parallel-size": _Already("this server is one replica", ("1",)),
    "--max-cpu-loras": _Already("all adapters stay in memory, as many as --max-loras", None),
    "--lora-dtype": _Already("adapters are in the type of --dtype", ("auto",)),
    "--fully-sharded-loras": _Already("adapters are computed by one rank"),
    "--guided-decoding-backend": _ENFORCED,
    "--structured-outputs-config.backend": _ENFORCED,
    "--runner": _Already("a model that generates is served so", ("auto", "generate")),
    "--task": _Already("a model that generates is served so", ("auto", "generate")),
    "--generation-config": _Already("the model's generation_config.json is read", ("auto",)),
    "--tokenizer": _Already("it is the model's own anyway", (_THE_MODEL,)),
    "--tokenizer-mode": _Already("the model's own tokenizer is used", ("auto",)),
    "--config-format": _Already("the model's config.json is read", ("auto", "hf")),
    "--chat-template-content-format": _Already("the template itself is looked at", ("auto",)),
    "--distributed-executor-backend": _Already("ranks are processes of this machine", ("mp",)),
    "--hf-overrides": _Already("it overrides nothing", ("{}",)),
    "--override-generation-config": _Already("it overrides nothing", ("{}",)),
    "--reasoning-config": _Already("reasoning is found by the chat template", None),
    "--compilation-config": _COMPILED,
    "-O": _COMPILED,
    "-O0": _COMPILED._replace(values=()),
    "-O1": _COMPILED._replace(values=()),
    "-O2": _COMPILED._replace(values=()),
    "-O3": _COMPILED._replace(values=()),
}
REFUSED = {
    "--no-enable-chunked-prefill": "prefill is always chunked; leave it out",
    "--enable-log-outputs": "texts are never logged; leave it out",
    "--max-logprobs": "the limit is 20; leave it out",
    "--uvicorn-log-level": "use --log-level",
    "--seed": "send a seed with each request; leave it out",
    "--data-parallel-size": "start one server for each replica, or penstock ray",
    "--lora-dtype": "adapters are in the type of --dtype; leave it out",
    "--tokenizer": "the tokenizer is read from the model's directory",
    "--revision": "download the revision first, and name its directory",
    "--cpu-offload-gb": "weights are not offloaded",
    "--runner": "models that generate are served, and their embeddings beside; leave it out",
    "--task": "models that generate are served, and their embeddings beside; leave it out",
    "--generation-config": "defaults are those of the model's directory; leave it out",
    "--tokenizer-mode": "the tokenizer is read from the model's directory; leave it out",
    "--config-format": "a model has a config.json or is a GGUF file; leave it out",
    "--chat-template-content-format": "the template itself is looked at; leave it out",
    "--distributed-executor-backend": "ranks are processes of this machine; leave it out",
    "--hf-overrides": "change the model's config.json, in a copy of its directory",
    "--override-generation-config": "change generation_config.json, in a copy of the directory",
    "--enable-force-include-usage": "clients ask for it with stream_options.include_usage",
}


def as_ours(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without flags that have no effect, and prints a line for each of those.
    Raises InvalidConfig for one that would have an effect with its value."""
    ours: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*ours, word, *left]
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name not in ALREADY:
            ours.append(name + has_value + value)
            continue
        if ALREADY[name].values != () and not has_value:
            value = left.pop(0) if left else ""
        values = [each.partition("=")[2] or each for each in arguments]
        if name == "--tokenizer" and values.count(value) > 1:
            value = _THE_MODEL
        if not says_nothing(name, value):
            raise InvalidConfig(f"{name} is a flag of vLLM; {REFUSED[name]}")
    return ours


def says_nothing(name: str, value: object) -> bool:
    """Whether a flag asks for what is so anyway, which is then printed. name: with hyphens or
    underscores."""
    flag = name if name.startswith("-") else f"--{name.replace('_', '-')}"
    known = ALREADY.get(flag)
    if known is None or (known.values and str(value) not in known.values):
        return False
    print(f"penstock: {flag} has no effect: {known.why}", file=sys.stderr)
    return True

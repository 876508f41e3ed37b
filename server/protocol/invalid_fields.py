"""A body's values, the errors that pydantic finds in them, as one error in a sentence, and fields
that other servers serve and we do not: refused by name, as they would change the answer.

What would not change it (a provider's accounting, hints for a cache, the padding of a stream) is
accepted, as is any unknown field. Some that have no effect are reported in the log.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from penstock.server.errors import InvalidRequest

# The values that a field may have, where pydantic's own words would list the branches of a union.
EXPECTED = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of such lists",
    "content": "must be a string or a list of parts",
    "stop": "must be a string or a list of strings",
    "tool_choice": 'must be "none", "auto", "required", or an object that names a function',
    "input": "must be a string or a list of items",
    "output": "must be a string or a list of parts",
    "system": "must be a string or a list of text blocks",
}

_MOST_NAMED = 16


def invalid_fields(
    error: ValidationError,
    model: type[BaseModel],
    *,
    at: str = "",
    expected: Mapping[str, str] = EXPECTED,
) -> InvalidRequest:
    """The first error, in a sentence. at: where in the body the model's values are.
    expected: what a field must be, where it may be several things.

    Without the names of fields the path of an error would hold those of a union's branches too.
    """
    errors = error.errors(include_url=False)
    # Every branch of a union reports an error; one not about types is of the branch meant.
    first = next((e for e in errors if not e["type"].endswith("_type")), errors[0])
    names = _field_names(model)
    place = first["loc"]
    if place[:1] == ("logit_bias",):  # whose keys the path holds too
        place = place[:1]
        keys = [str(e["loc"][1])[:64] for e in errors if e["loc"][2:] == ("[key]",)]
        if keys:
            message = f"logit_bias has {listed('key', keys)}; its keys must be token ids"
            return InvalidRequest(message, param="logit_bias", code="invalid_value")
    path = [part for part in place if isinstance(part, int) or part in names]
    if not path:
        return InvalidRequest("the body must be a JSON object", code="invalid_json")
    steps = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    param = f"{at}{steps}" if at else steps[1:]
    code = _code_of(first)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing", param=param, code=code)
    last_name = next(part for part in reversed(path) if isinstance(part, str))
    is_branch = last_name in expected and first["type"].endswith("_type")
    says = expected[last_name] if is_branch else _as_predicate(first)
    return InvalidRequest(f"{param} {says}", param=param, code=code)


def listed(noun: str, wrong: list[str] | list[int]) -> str:
    """Names the values that are wrong, after their noun; some of them where they are many."""
    noun = noun if len(wrong) == 1 else f"{noun}s"
    more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    return f"the {noun} {', '.join(map(repr, wrong[:_MOST_NAMED]))}{more}"


# OpenAI's codes for what is wrong with a value, by pydantic's.
_CODES = {
    "missing": "missing_required_parameter",
    "too_short": "empty_array",  # no list of ours needs more than one item, and no text
    "string_too_short": "empty_string",  # more than one character
    "string_too_long": "string_above_max_length",
}


def _code_of(error: Mapping[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind.endswith("_type"):
        return "invalid_type"
    if kind == "too_long":
        is_list = context["field_type"] == "List"
        return "array_above_max_length" if is_list else "object_above_max_properties"
    for begins, side in (("greater_than", "below_min"), ("less_than", "above_max")):
        if kind.startswith(begins):
            is_decimal = any(isinstance(limit, float) for limit in context.values())
            return f"{'decimal' if is_decimal else 'integer'}_{side}_value"
    return _CODES.get(kind, "invalid_value")


# JSON's terms, where pydantic has Python's for values that were parsed before.
_IN_JSON = {
    "dict_type": "should be an object",
    "model_type": "should be an object",
    "list_type": "should be a valid array",
}


def _as_predicate(error: Mapping[str, Any]) -> str:
    """ "Input should be a valid string" and its like, to go after the field's name."""
    if error["type"] in _IN_JSON:
        return _IN_JSON[error["type"]]
    message = re.sub(r"^(Input|List|String|Dictionary) ", "", error["msg"])
    return message.replace(" after validation", "")


def json_of(body: bytes) -> Any:
    """Raises InvalidRequest.

    Pydantic would read the JSON as it validates, but it copies a text for each type that its field
    may have. For 32 MiB that takes four times as long, and nothing else runs meanwhile.
    """
    try:
        return from_json(body)
    except ValueError as error:
        message = f"the body is not valid JSON: {error}"
        raise InvalidRequest(message, code="invalid_json") from error


def nul(param: str) -> InvalidRequest:
    message = f"{param} has a NUL character (U+0000), which is not text; remove it"
    return InvalidRequest(message, param=param)


@cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    """Names its fields, and those of the models in them."""
    names: set[str] = set()
    models, seen = [model], set()
    while models:
        each = models.pop()
        if each in seen:
            continue
        seen.add(each)
        names |= each.model_fields.keys()
        for field in each.model_fields.values():
            models += _models_in(field.annotation)
    return frozenset(names)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


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
    "dynatemp_range": (0,),
    "lora": ([],),
    "mirostat": (0,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "samplers": (),
    "t_max_predict_ms": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
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
    "kv_transfer_params": "leave it out: this server computes a prompt and its answer itself",
    "logprob_token_ids": "use top_logprobs (of completions: logprobs), the 20 likeliest",
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "n_probs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "repeat_penalty": "use repetition_penalty",
    "return_prompt_text": "use return_token_ids and POST /detokenize",
    "thinking": "put enable_thinking in chat_template_kwargs",
    "use_beam_search": "use best_of, which returns the likeliest of several samples",
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

"""How the texts of flags become values, and values what a config holds."""

import argparse
import contextlib
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from penstock.engine.client import (
    AdapterSource,
    DraftMethod,
    KVCacheDtype,
    KVEventsConfig,
    Quantization,
    SpeculativeConfig,
)
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Pooling
from penstock.server.config import DEFAULT_MAX_IMAGES, PoolerConfig

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
# As in vLLM: 4k is 4,000 and 4K is 4,096.
_FACTORS = {
    "": 1,
    **{"k": 10**3, "m": 10**6, "g": 10**9},
    **{"K": 2**10, "M": 2**20, "G": 2**30},
}
_GROUPS = "int8 has a scale for each 32 weights"
_INSTEAD = "use " + " or ".join(Quantization)
# Values of vLLM's --quantization, by what vLLM does with them.
_VLLM_AT_LOAD = {
    "int8_per_channel_weight_only": f"{_GROUPS}, not one a channel: use int8, which loses less",
    "fp8_per_channel": "use fp8, which has a scale for each row",
    **dict.fromkeys(
        (
            "fp8_per_tensor",
            "fp8_per_block",
            "nvfp4_per_token",
            "mxfp8",
            "online",
        ),
        _INSTEAD,
    ),
}
_VLLM_STORED = (
    *("awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "modelopt"),
    *("modelopt_fp4", "bitsandbytes", "mxfp4", "gguf", "torchao", "quark", "auto-round"),
)
# vLLM's names. Our codes have a scale for each token and head, whatever they are called.
_KV_CACHE_ALIASES = {
    "fp8_e4m3": "fp8",
    "fp8_per_token_head": "fp8",
    "int8_per_token_head": "int8",
}
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_PLAIN_TYPES = ("float32", "float", "bfloat16", "float16", "half")


def size(text: str) -> int:
    """4096, 4k (4,000), 4K (4,096), 1.5M: for argparse's `type`."""
    found = _SIZE.fullmatch(text)
    value = float(found[1]) * _FACTORS[found[2]] if found else 0.5
    if not value.is_integer():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number, such as 4096, 4k (4,000) or 4K (4,096)"
        )
    return int(value)


class _KVEvents(msgspec.Struct, forbid_unknown_fields=True):
    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=0)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    topic: str = ""


def kv_events_config(text: str) -> KVEventsConfig | None:
    """vLLM's JSON: for argparse's `type`. None where no events are wanted."""
    found = _decoded(text, _KVEvents)
    if not found.enable_kv_cache_events or found.publisher == "null":
        return None
    values = msgspec.structs.asdict(found)
    return KVEventsConfig(**{each.name: values[each.name] for each in fields(KVEventsConfig)})


class _Speculative(msgspec.Struct, forbid_unknown_fields=True):
    method: DraftMethod | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 8
    model: str | None = None
    quantization: Quantization | None = None


def speculative_config(text: str) -> SpeculativeConfig:
    """vLLM's JSON: for argparse's `type`."""
    try:
        found = _decoded(text, _Speculative)
        method = DraftMethod.SUFFIX if found.model is None else DraftMethod.DRAFT_MODEL
        values = msgspec.structs.asdict(found) | {"method": found.method or method}
        return SpeculativeConfig(**values)
    except (argparse.ArgumentTypeError, InvalidConfig) as error:
        hint = (
            "method is ngram, suffix, mtp or draft_model, with a model that proposes and perhaps "
            "its quantization, and num_speculative_tokens 0 to 64; there is no other key"
        )
        raise argparse.ArgumentTypeError(f"{error}; {hint}") from None


def lora_module(text: str) -> AdapterSource:
    """NAME=PATH, or vLLM's JSON: for argparse's `type`."""
    if not text.lstrip().startswith("{"):
        name, has_path, path = text.partition("=")
        if not (name and has_path and path):
            raise argparse.ArgumentTypeError(
                f'{text!r} is neither NAME=PATH nor {{"name": NAME, "path": PATH}}'
            )
        return AdapterSource(name=name, path=_absolute(path))
    source = _decoded(text, _LoraModule)
    return AdapterSource(
        name=source.name, path=_absolute(source.path), base_model_name=source.base_model_name
    )


class _LoraModule(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    path: Annotated[str, msgspec.Meta(min_length=1)]
    base_model_name: str | None = None


def _decoded(text: str, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _absolute(path: str) -> str:
    """A path that is not there may be a name of the hub, which stays as it is."""
    here = Path(path).expanduser()
    return str(here.absolute()) if here.exists() or path[0] in "/.~" else path


def kv_cache_dtype(text: str) -> KVCacheDtype:
    """Our names and vLLM's: for argparse's `type`."""
    name = _KV_CACHE_ALIASES.get(text, text)
    if name in _PLAIN_TYPES:
        raise argparse.ArgumentTypeError(
            f"{text} is a type of the model too; leave the flag out, and the KV cache has the type "
            "of --dtype"
        )
    if name not in list(KVCacheDtype):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not supported; choose int8 or fp8 (e4m3), with a scale for each token "
            "and head that is computed as it is stored, or auto, the type of --dtype"
        )
    return KVCacheDtype(name)


def quantization(text: str) -> Quantization:
    with contextlib.suppress(ValueError):
        return Quantization(text)
    supported = " or ".join(Quantization)
    why = f"it must be {supported}"
    if text in _VLLM_AT_LOAD:
        why = f"of vLLM's formats at load none is supported; {_VLLM_AT_LOAD[text]}"
    elif text in _VLLM_STORED:
        why = (
            "it names how a checkpoint was quantized, which config.json says; leave it out, or "
            f"use {supported} with an unquantized checkpoint"
        )
    raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {why}")


def json_list(text: str) -> list[str]:
    """vLLM's form of these flags."""
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError:
        raise argparse.ArgumentTypeError(
            f'{text} is not a JSON list of strings; write it like ["*"]'
        ) from None


def json_object(text: str) -> dict[str, Any]:
    """vLLM's form of these flags."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object") from None


def pooler_config(text: str) -> PoolerConfig:
    """vLLM's form of this flag."""
    try:
        values = json.loads(text)
        pooling, normalize = values.pop("pooling_type", None), values.pop("normalize", None)
        if values or not (normalize is None or isinstance(normalize, bool)):
            raise ValueError
        return PoolerConfig(
            pooling=None if pooling is None else Pooling(pooling.lower()), normalize=normalize
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f'{text} must be like {{"pooling_type": "MEAN", "normalize": true}}; pooling_type is '
            "LAST, CLS or MEAN, and there are no other keys"
        ) from error


def max_images(text: str) -> int:
    """vLLM's form of this flag."""
    try:
        values = json.loads(text)
        most = values.pop("image", DEFAULT_MAX_IMAGES)
        if isinstance(most, bool) or not isinstance(most, int) or any(values.values()):
            raise ValueError
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f'{text} must be like {{"image": 4}}; there are neither videos nor audio here, so that '
            "these are 0 or left out"
        ) from error
    return int(most)


def gib(count: float, flag: str) -> int:
    """Returns bytes. Raises InvalidConfig."""
    if not 0 < count < math.inf:
        raise InvalidConfig(f"{flag} is {count:g}; it must be more than 0, and finite")
    return int(count * 2**30)


def only_key(file: Path, flag: str) -> str:
    """Returns the one key in a file. Raises InvalidConfig."""
    keys = keys_in(file, flag)
    if len(keys) > 1:
        raise InvalidConfig(f"{flag} {file} has {len(keys)} keys; write one")
    return keys[0]


def keys_in(file: Path, flag: str) -> list[str]:
    """Returns at least one key. Raises InvalidConfig."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{flag} {file} cannot be read: {error}") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise InvalidConfig(f"{flag} {file} contains no key; write one per line")
    return keys

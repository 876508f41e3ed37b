"""Reads an adapter that PEFT saved, adapter_model.safetensors beside adapter_config.json, and knows
which linear layers of a model it may change."""

import hashlib
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.engine.config import ADAPTER_FILES
from penstock.engine.errors import AdapterRefused
from penstock.engine.files.json_file import check_regular
from penstock.engine.files.safetensors import open_safetensors
from penstock.engine.files.tensor_files import PLAIN_DTYPES, is_finite
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.lora.peft import CONFIG, PeftConfig
from penstock.engine.models.parts.adapter import Adapter, Change, Projection
from penstock.engine.models.parts.tensors import Stack

WEIGHTS = ADAPTER_FILES[1]
_PICKLED = "adapter_model.bin"
_BASE = "base_model.model."
_TENSOR = re.compile(
    r"(?P<module>(?:model|model\.language_model|language_model\.model)\.layers\.(?P<layer>\d{1,6})\."
    r"(?P<projection>[\w.]+))\.lora_(?P<side>[AB])\.weight"
)
_DIGEST_CHARS = 32
_MAX_CONFIG_BYTES = 1 << 20

# Tensors of parts that are not supported have these in their names.
_UNSUPPORTED = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding": "changed token embeddings",
    "embed_tokens": "changed token embeddings",
    "lm_head": "a changed output layer",
    ".lora_A.bias": "biases of LoRA layers",
    ".lora_B.bias": "biases of LoRA layers",
}


def projections(model: ModelConfig, layer: int) -> dict[str, Projection]:
    """Those that adapters may change, by their names in a checkpoint; in order. Experts and what
    chooses them are not among them."""
    found: dict[str, Projection] = {}
    for linear in model.layers[layer].tensors.linears:
        if linear.adapters is None:
            continue
        start = 0
        for matrix in linear.matrices:
            for name in matrix.names:
                found[name] = Projection(linear.adapters, start, *matrix.shape)
                start += matrix.num_rows
    return found


def max_adapter_bytes(model: ModelConfig, rank: int, itemsize: int) -> int:
    """Counts bytes of an adapter of this rank that changes all layers; on a GPU, of one slot."""
    per_rank = sum(
        each.out_features + each.in_features
        for layer in range(model.num_layers)
        for each in projections(model, layer).values()
    )
    return per_rank * rank * itemsize


def adapter_digest(directory: Path) -> str:
    """Hashes its files. Raises AdapterRefused where one is missing, InvalidModel for what is
    not a file."""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        path = directory / name
        check_regular(path)
        try:
            with path.open("rb") as file:
                if name == CONFIG and os.fstat(file.fileno()).st_size > _MAX_CONFIG_BYTES:
                    raise AdapterRefused(
                        f"{path} has more than {_MAX_CONFIG_BYTES} bytes; PEFT writes some hundred"
                    )
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except FileNotFoundError:
            raise _missing(directory, name) from None
        except OSError as error:
            raise AdapterRefused(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:_DIGEST_CHARS]


def read_adapter(
    directory: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_rank: int,
    shard: Shard | None = None,
    first_layer: int = 0,
) -> Adapter:
    """dtype: of what it computes with. shard, first_layer: where `model` is a rank's, or has the
    layers from that on, of a whole model, all of whose changes are checked. Raises PenstockError.
    """
    shard = shard or Shard(model)
    whole = shard.model
    config = PeftConfig(directory, max_rank)
    tensors = _Tensors(directory / WEIGHTS, dtype, device)
    config.match(
        [
            f"{tensors.prefix}layers.{index}.{name}"
            for index in range(whole.num_layers)
            for name in projections(whole, index)
        ]
    )
    layers: list[dict[Stack, tuple[Change, ...]]] = []
    highest = 0
    for index in range(whole.num_layers):
        changes: dict[Stack, list[Change]] = defaultdict(list)
        is_own = first_layer <= index < first_layer + model.num_layers
        own = projections(model, index - first_layer) if is_own else {}
        for name, projection in projections(whole, index).items():
            module = f"{tensors.prefix}layers.{index}.{name}"
            if config.applies_to(module):
                rank, scale = config.rank(module), config.scale(module)
                highest = max(highest, rank)
                both = tensors.change(module, projection, rank)
                if is_own:
                    down, up = shard.slice_adapter(f"model.layers.{index}.{name}.weight", *both)
                    changes[projection.stack].append(Change(own[name], down, up, scale))
        if is_own:
            layers.append({stack: tuple(each) for stack, each in changes.items()})
    tensors.check_all_taken(whole)
    if not highest:
        raise AdapterRefused(
            f"{directory / CONFIG}: target_modules names no layer of this model; load the adapter "
            f"with its own base model (layers here: {', '.join(projections(whole, 0))})"
        )
    return Adapter(tuple(layers), highest)


class _Tensors:
    """Reads one file. prefix: begins the names of layers in it."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._path = path
        self._dtype = dtype
        self._device = device
        self._file: Any = open_safetensors(path, framework="pt")
        self._left: set[str] = set(self._file.keys())
        self.prefix = "model."
        for name in sorted(self._left):
            for part, what in _UNSUPPORTED.items():
                if part in name:
                    raise AdapterRefused(
                        f"{path} has the tensor {name!r}, of {what}, which is not supported; merge "
                        "the adapter into its base model, or train one without"
                    )
            match = _TENSOR.fullmatch(name.removeprefix(_BASE))
            if match is None:
                raise AdapterRefused(
                    f"{path} has the tensor {name!r}, which is of no layer of a Llama-like model; "
                    "only low-rank changes of its linear layers are supported"
                )
            self.prefix = match["module"].partition("layers.")[0]

    def change(self, module: str, projection: Projection, rank: int) -> tuple[Tensor, Tensor]:
        """A and B."""
        down = self._take(f"{_BASE}{module}.lora_A.weight", (rank, projection.in_features))
        up = self._take(f"{_BASE}{module}.lora_B.weight", (projection.out_features, rank))
        return down, up

    def _take(self, name: str, shape: tuple[int, int]) -> Tensor:
        if name not in self._left:
            raise AdapterRefused(
                f"{self._path} lacks the tensor {name!r}, which {CONFIG} implies; save or download "
                "the adapter again"
            )
        self._left.remove(name)
        try:
            stored: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise AdapterRefused(f"{self._path}: {name!r}: {error}") from None
        if stored.dtype not in PLAIN_DTYPES:
            raise AdapterRefused(
                f"{self._path}: {name!r} is {stored.dtype}; only float32, float16 and bfloat16 are "
                "supported"
            )
        if tuple(stored.shape) != shape:
            raise AdapterRefused(
                f"{self._path}: {name!r} has the shape {tuple(stored.shape)}, and {shape} is what "
                "this model and the adapter's rank need; load it with its own base model"
            )
        tensor = stored.to(device=self._device, dtype=self._dtype, copy=True).contiguous()
        if not is_finite(tensor):
            raise AdapterRefused(
                f"{self._path}: {name!r} has numbers that are not finite in {self._dtype}; train "
                "or download the adapter again, or use another --dtype"
            )
        return tensor

    def check_all_taken(self, model: ModelConfig) -> None:
        if not self._left:
            return
        name = min(self._left)
        linears = (linear for layer in model.layers for linear in layer.tensors.linears)
        fixed = {each for linear in linears if linear.adapters is None for each in linear.names}
        match = _TENSOR.fullmatch(name.removeprefix(_BASE))
        if match is not None and match["projection"] in fixed:
            raise AdapterRefused(
                f"{self._path} has the tensor {name!r}, a change of {match['projection']}, which "
                "is not supported; merge the adapter into its base model, or train one without"
            )
        raise AdapterRefused(
            f"{self._path} has the tensor {name!r}, which is of no layer of this model that "
            f"{CONFIG} names; load the adapter with its own base model"
        )


def _missing(directory: Path, name: str) -> AdapterRefused:
    if name == WEIGHTS and (directory / _PICKLED).exists():
        return AdapterRefused(
            f"{directory / _PICKLED} is pickled, and unpickling may run any code; save the adapter "
            f"as {WEIGHTS} (save_pretrained of PEFT does)"
        )
    return AdapterRefused(
        f"{directory} has no {name}; name a directory as PEFT saves an adapter, downloaded before"
    )

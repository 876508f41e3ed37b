"""`MtpHead`: Qwen3.5's head that predicts the token after the next (multi-token prediction, MTP).

One layer with attention reads, at each position, the embedding of the token that follows and the
state that the served model has there after its final norm; the output layer and the embedding are
the served model's. What it computes is that of vLLM's `qwen3_5_mtp`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.files.safetensors import tensor_names
from penstock.engine.files.tensor_files import TensorFiles
from penstock.engine.models.config import LAYER, ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.reader import PartReader, TableRows, WeightSource
from penstock.engine.models.parts.tensors import Axis, LinearSpec, VectorSpec, matrix

_HEAD = "mtp."
_FAMILIES = {"qwen3_5_text", "qwen3_5_moe_text"}


def lacks_head(model_dir: Path) -> str | None:
    """Says in words why the checkpoint has no head that can be computed; None where it has one."""
    names = [name for name in tensor_names(model_dir) or () if name.startswith(_HEAD)]
    config = ModelConfig.from_dir(model_dir)
    if not names or config.family not in _FAMILIES:
        return "the checkpoint has no such head (tensors mtp.* of Qwen3.5, 3.6 or 3.8)"
    files = TensorFiles(model_dir)
    if any(name.startswith(f"{_HEAD}layers.1.") for name in names):
        return "its head has several layers"
    if any(name.startswith(f"{_HEAD}embed_tokens.") for name in names):
        return "its head has an embedding of its own"
    if not all(_is_known(name, config) for name in names if not _is_plain(files, name)):
        return "its head is quantized in the checkpoint, and config.json does not say how"
    return None


def head_config(model: ModelConfig) -> ModelConfig:
    """The head's layer as a model: one like the served model's last with attention."""
    layers = [layer for layer in model.layers if layer.attention is not None]
    return replace(model, layers=(layers[-1],))


def head_weights(head: ModelConfig) -> int:
    """How many elements it has that the served model does not have."""
    [table] = [layer.tensors for layer in head.layers]
    both = 2 * head.hidden_size**2
    return table.num_step_weights() + table.num_routed_weights() + both + 3 * head.hidden_size


class HeadWeights:
    """The source of a checkpoint, of which a model's layers are those of the head."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._source.read(shape, *map(_name, names), dtype=dtype)

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        return self._source.table(shape, _name(name))

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        return self._source.quantized(shape, bias, *map(_name, names))


class MtpHead(LlamaModel):
    """To be computed by the compiled step alone. target: the served model."""

    def __init__(self, target: LlamaModel, weights: WeightSource, **how: Any) -> None:
        """weights: of which layers are the head's. how: as of `LlamaModel`."""
        self._target = target
        super().__init__(
            head_config(target.config), weights, max_model_len=1, device=target.norm.device, **how
        )
        self.rotary.layers = {0: target.rotary.layers[max(target.rotary.layers)]}

    def _read_ends(self, reader: PartReader, empty: Callable[..., Tensor]) -> None:
        hidden = Axis(self.config.hidden_size)
        self.embedding, self.lm_head = self._target.embedding, self._target.lm_head

        def norm(name: str) -> Tensor:
            return reader.vector(VectorSpec(f"{_HEAD}{name}.weight", (hidden,), is_norm=True))

        self.norm = norm("norm")
        self.embedded_norm = norm("pre_fc_norm_embedding")
        self.state_norm = norm("pre_fc_norm_hidden")
        both = Axis(2 * hidden.size)
        self.fc = reader.linear(
            LinearSpec((matrix(f"{_HEAD}fc", hidden, both),), is_quantizable=False)
        )

    @property
    def own_bytes(self) -> int:
        """Those of what the served model does not have."""
        ends = self.norm.nbytes + self.embedded_norm.nbytes + self.state_norm.nbytes
        layers = sum(part.num_bytes + part.expert_bytes for part in self.parts)
        return ends + self.fc.num_bytes + layers


def _name(name: str) -> str:
    return f"{_HEAD}layers.{name.removeprefix(LAYER)}" if name.startswith(LAYER) else name


def _is_known(name: str, config: ModelConfig) -> bool:
    """Whether config.json says how this tensor of codes is read: those of its layer alone are."""
    quantization, layer = config.quantization, name.rpartition(".")[0]
    if quantization is None or not name.startswith(f"{_HEAD}layers."):
        return False
    return quantization.scheme_if_quantized(layer) is not None


def _is_plain(files: TensorFiles, name: str) -> bool:
    return files.get(name).is_floating_point() and files.get(name).element_size() > 1

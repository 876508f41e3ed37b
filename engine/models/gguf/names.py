"""The tensors of a GGUF file, by the names that they have in Hugging Face's checkpoints, which the
parts of a model declare."""

import re

from penstock.engine.models.config import ModelConfig, index_and_name

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

# Besides those that a model computes with: frequencies of rotary positions, which older files have,
# and Llama 3's factors of them, which are read with the metadata.
UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
# Those that one layer is stacked of.
STACKED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))


class GgufNames:
    """The names and shapes of one model's tensors."""

    def __init__(self, config: ModelConfig) -> None:
        self._outside = {name: gguf for name, gguf, _ in config.tensors.shapes() if gguf}
        self._in_layers = [
            {name: gguf for name, gguf, _ in layer.tensors.shapes() if gguf}
            for layer in config.layers
        ]
        self.shapes: dict[str, tuple[int, ...]] = {}
        """By the names in the file, of all that it must have."""
        for _, gguf, shape in config.tensors.shapes():
            if gguf and not (config.head.is_tied and gguf == OUTPUT):
                self.shapes[gguf] = shape
        for index, layer in enumerate(config.layers):
            for _, gguf, shape in layer.tensors.shapes():
                if gguf:
                    self.shapes[f"blk.{index}.{gguf}"] = shape

    def of(self, name: str) -> str:
        """name: as transformers has it, such as "model.layers.0.mlp.up_proj.weight"."""
        index, rest = index_and_name(name)
        if index is None:
            return self._outside[rest]
        return f"blk.{index}.{self._in_layers[index][rest]}"

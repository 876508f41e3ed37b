"""The tensors of a GGUF file, by the names that they have in Hugging Face's checkpoints, which the
parts of a model declare."""

import re

from penstock.engine.models.config import LAYER, ModelConfig

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
        self._stored: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """By the names in the file, of all that it must have."""
        for prefix, table in config.tables:
            for name, gguf, shape in table.shapes():
                if gguf:
                    stored = prefix.replace(LAYER, "blk.") + gguf
                    self._stored[prefix + name] = stored
                    if not (config.head.is_tied and gguf == OUTPUT):
                        self.shapes[stored] = shape

    def of(self, name: str) -> str:
        """name: as transformers has it, such as "model.layers.0.mlp.up_proj.weight"."""
        return self._stored[name]

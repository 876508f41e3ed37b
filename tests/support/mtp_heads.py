"""Heads that draft the token after the next, as published, in torch: beside a model in
transformers, and in its checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.tiny_models import save


class ReferenceHead(nn.Module):
    """What vLLM's Qwen3_5MultiTokenPredictor computes, of transformers' layer with attention."""

    def __init__(self, model: Any, seed: int = 5) -> None:
        super().__init__()
        self._model = [model]  # not a part of this module
        text = model.model if hasattr(model.model, "embed_tokens") else model.model.language_model
        self._text, config = [text], text.config
        index = len(config.layer_types) - 1 - config.layer_types[::-1].index("full_attention")
        self.layers = nn.ModuleList([type(text.layers[index])(config, index)])
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding: Any = type(text.norm)(hidden, eps=eps)
        self.pre_fc_norm_hidden: Any = type(text.norm)(hidden, eps=eps)
        self.norm: Any = type(text.norm)(hidden, eps=eps)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            size = 4 if "norm" in name else 8
            parameter.data = torch.randn(parameter.shape, generator=generator) / size
        self.eval()

    def forward(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Both (T, ...): of each position the id that follows, and the served model's state."""
        [text] = self._text
        embedded = text.embed_tokens(token_ids)
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states))
        x = self.fc(torch.cat(both, dim=-1)).unsqueeze(0)
        length = len(token_ids)
        positions = torch.arange(length).view(1, 1, -1).expand(3, 1, -1)
        mask = torch.full((length, length), -torch.inf).triu(1).view(1, 1, length, length)
        angles = text.rotary_emb(x, positions)
        x = self.layers[0](x, position_embeddings=angles, attention_mask=mask)
        found: Tensor = self.norm(x)[0]
        return found

    @torch.inference_mode()
    def gaps(self, known: list[int], drafts: Iterable[int], first: int = 0) -> list[float]:
        """How far the logit of each draft after these ids is from the largest. first: the position
        from which on the head attends."""
        [model], [text] = self._model, self._text
        ids = torch.tensor(known)
        states = text(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0, first:]
        following, found = ids[first + 1 :], []
        for draft in drafts:
            last = self(following, states)[-1:]
            logits = model.lm_head(last)[0]
            found.append(float(logits.max() - logits[draft]))
            following = torch.cat((following, torch.tensor([draft])))
            states = torch.cat((states, last))
        return found


def rig(model: Any, head: ReferenceHead) -> None:
    """Makes both predict from the last token alone, and the same."""
    [text] = head._text
    for layer in (*text.layers, *head.layers):
        for name, parameter in layer.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight")) or "down_proj" in name:
                parameter.data.zero_()
    hidden = text.config.hidden_size
    head.fc.weight.data = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    head.pre_fc_norm_embedding.weight.data.zero_()
    head.norm.weight.data = text.norm.weight.data.clone()


def save_with_head(model: Any, head: ReferenceHead, path: Path) -> Path:
    return add_head(save(model, path), head, {})


def add_head(path: Path, head: ReferenceHead, codes: dict[str, Tensor]) -> Path:
    """To the checkpoint of its model. codes: of its layers that are quantized, by their names."""
    file = path / "model.safetensors"
    coded = {name.rpartition(".")[0] for name in codes}
    tensors = {
        f"mtp.{name}": tensor.contiguous()
        for name, tensor in head.state_dict().items()
        if name.rpartition(".")[0] not in coded and not (codes and ".experts." in name)
    }
    tensors |= {f"mtp.{name}": tensor for name, tensor in codes.items()}
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return path

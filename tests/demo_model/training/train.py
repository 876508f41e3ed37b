"""Trains the demo model: `python -m tests.demo_model.training.train --seed 0`.

Trains the tokenizer and the network on the text of `corpus.py`, on one CPU thread, and writes the
folder that `penstock serve` loads. The seed fixes the text, the tokenizer and the initial weights;
engine/hub/demo_model/README.md lists the runs that made the shipped files.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from tests.demo_model.training.corpus import Document, documents
from tests.demo_model.training.network import Network, NetworkConfig
from tests.demo_model.training.tokenizer import (
    END_OF_TEXT_ID,
    TURN_END_ID,
    encode,
    save_tokenizer,
    train_tokenizer,
)
from tests.support.paths import DEMO_MODEL

# The held-out text comes from another seed, too far away to be used for training.
HELD_OUT_SEED_OFFSET = 1_000_003
# Users' messages are nearly random: they teach a little, but must not outweigh the answers.
PROMPT_TOKEN_WEIGHT = 0.1
# The learning rate warms up, stays constant, and falls linearly to zero from this share of the run.
DECAY_START = 0.35
WARMUP_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Hyperparameters of a run.

    steps: an exact number, which makes the run reproducible; None for as many as fit in `minutes`.
    row_lengths: (share of the run at which it begins, tokens in a row). Short rows first, because
    attention's cost grows with length; long ones last, so that the whole context is trained.
    """

    seed: int = 0
    minutes: float = 35.0
    steps: int | None = None
    tokens_per_step: int = 4096
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    row_lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.6, 512), (0.88, 2048))
    num_tokenizer_documents: int = 20_000
    num_held_out_rows: int = 32


@dataclass(frozen=True, slots=True)
class Rows:
    """token_ids, weights: (rows, length + 1). weights: of each token in the loss."""

    token_ids: Tensor
    weights: Tensor


def packed_rows(tokenizer: Tokenizer, source: Iterator[Document], count: int, length: int) -> Rows:
    """Each row starts with a new document and is filled with more; the last is truncated."""
    ids, weights = [], []
    for _ in range(count):
        row_ids: list[int] = []
        row_generated: list[bool] = []
        while len(row_ids) <= length:
            more_ids, more_generated = encode(tokenizer, next(source))
            row_ids += more_ids
            row_generated += more_generated
        ids.append(row_ids[: length + 1])
        weights.append(row_generated[: length + 1])
    prompt_weight = torch.full((), PROMPT_TOKEN_WEIGHT)
    return Rows(
        torch.tensor(ids), torch.where(torch.tensor(weights), torch.ones(()), prompt_weight)
    )


def weighted_loss(network: nn.Module, rows: Rows) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(rows.token_ids[:, :-1])
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), rows.token_ids[:, 1:].flatten(), reduction="none"
    )
    weights = rows.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def held_out_loss(network: Network, tokenizer: Tokenizer, config: TrainConfig) -> float:
    """Nats per token on text of another seed, weighted as in training."""
    source = documents(config.seed + HELD_OUT_SEED_OFFSET)
    rows = packed_rows(tokenizer, source, config.num_held_out_rows, 512)
    return weighted_loss(network, rows).item()


def make_optimizers(network: Network, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon, which learns more from each token, for the matrices; AdamW for embedding and norms."""
    inner = list(network.model.layers.named_parameters())
    matrices = [parameter for _, parameter in inner if parameter.dim() == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in network.parameters() if id(parameter) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_at(step: int, progress: float) -> float:
    """The factor on the configured rate, between 0 and 1."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, max(0.0, (1.0 - progress) / (1.0 - DECAY_START)))


def row_length_at(progress: float, config: TrainConfig) -> int:
    return [length for start, length in config.row_lengths if progress >= start][-1]


class Training:
    """One run: the network, its optimizers and its progress."""

    def __init__(self, config: TrainConfig, folder: Path, start_from: Path | None) -> None:
        """start_from: a folder of an earlier run whose tokenizer and weights to continue from, or
        None for new ones."""
        torch.manual_seed(config.seed)
        self._config = config
        self._folder = folder
        self._network_config = NetworkConfig()
        self._network = Network(self._network_config)
        self._earlier: dict[str, object] | None = None
        if start_from is None:
            sample = islice(documents(config.seed), config.num_tokenizer_documents)
            self._tokenizer = train_tokenizer(sample, self._network_config.vocab_size)
        else:
            self._tokenizer = Tokenizer.from_file(str(start_from / "tokenizer.json"))
            self._network.load_state_dict(load_file(start_from / "model.safetensors"))
            self._earlier = json.loads((start_from / "training.json").read_text(encoding="utf-8"))
        self._optimizers = make_optimizers(self._network, config)
        self._source = documents(config.seed)
        self._started_at = time.monotonic()
        self._step = 0
        self._num_tokens = 0

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def _progress(self) -> float:
        if self._config.steps is not None:
            return self._step / self._config.steps
        return self._elapsed_s / (60 * self._config.minutes)

    def run(self) -> None:
        while (progress := self._progress) < 1:
            loss = self._train_step(progress)
            if self._step % 20 == 0:
                self._print_progress(loss)
            if self._step % 250 == 0:
                self.save()
        self.save()

    def _train_step(self, progress: float) -> Tensor:
        config = self._config
        length = row_length_at(progress, config)
        rows = packed_rows(self._tokenizer, self._source, config.tokens_per_step // length, length)
        loss = weighted_loss(self._network, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * learning_rate_at(self._step, progress)
            optimizer.step()
            optimizer.zero_grad()
        self._step += 1
        self._num_tokens += config.tokens_per_step
        return loss.detach()

    def _print_progress(self, loss: Tensor) -> None:
        elapsed, progress = self._elapsed_s, self._progress
        left = elapsed / progress - elapsed
        speed = self._num_tokens / elapsed
        print(
            f"step {self._step}  loss {loss.item():.3f}  {speed:,.0f} tokens/s  "
            f"{left / 60:.1f} minutes left",
            flush=True,
        )

    def save(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(self._tokenizer, self._folder, self._network_config.max_positions)
        write_json(self._folder / "config.json", llama_config(self._network_config))
        write_json(self._folder / "generation_config.json", GENERATION_CONFIG)
        tensors = {
            name: parameter.detach().to(torch.bfloat16).contiguous()
            for name, parameter in self._network.named_parameters()
        }
        # A rename is atomic: a reader never sees half a file.
        unfinished = self._folder / "model.safetensors.tmp"
        unfinished.write_bytes(save(tensors, metadata={"format": "pt"}))
        unfinished.replace(self._folder / "model.safetensors")
        write_json(self._folder / "training.json", self._record())

    def _record(self) -> dict[str, object]:
        loss = held_out_loss(self._network, self._tokenizer, self._config)
        print(f"held-out loss {loss:.4f}", flush=True)
        return {
            "seed": self._config.seed,
            "steps": self._step,
            "tokens": self._num_tokens,
            "held_out_loss": round(loss, 4),
            "parameters": self._network.num_parameters,
            "training_minutes": round(self._elapsed_s / 60, 1),
            "torch": torch.__version__,
            "train_config": asdict(self._config),
            "started_from": self._earlier,
        }


GENERATION_CONFIG: dict[str, object] = {
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.95,
    "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
    "pad_token_id": END_OF_TEXT_ID,
}


def llama_config(config: NetworkConfig) -> dict[str, object]:
    """The network's sizes under the names of transformers' LlamaConfig."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Penstock's demo model on one CPU thread.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=TrainConfig().minutes)
    parser.add_argument("--steps", type=int, help="train this many steps, however long they take")
    parser.add_argument("--learning-rate", type=float, default=TrainConfig().learning_rate)
    parser.add_argument(
        "--start-from", type=Path, help="continue from the folder of an earlier run"
    )
    parser.add_argument("--out", type=Path, default=DEMO_MODEL)
    arguments = parser.parse_args()
    # The matrices are too small for more threads to help.
    torch.set_num_threads(1)
    config = TrainConfig(
        seed=arguments.seed,
        minutes=arguments.minutes,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
    )
    Training(config, arguments.out, arguments.start_from).run()


if __name__ == "__main__":
    main()

"""Distils a draft of a model: `python -m tests.demo_model.training.distil`.

A draft is a small model of the same tokens that says what comes next; the model itself verifies it
(docs/serving.md, "Drafts of next tokens"). It learns the model's distribution of each next token,
at temperature 1: on the text, and on the model's own answers to it, half of them greedy, which it
will be asked about. Without flags it makes the draft that ships with the demo model; a seed fixes
the text, the answers and the initial weights.

    python -m tests.demo_model.training.distil --model DIR --text FILE --out DIR/draft

FILE has a JSON object a line: {"messages": [...]} as in OpenAI's files for fine-tuning, of which
the last is an answer, or {"text": "..."}. Every twentieth line is held out, to measure with.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.scheduler.types import SamplingParams
from tests.demo_model.training.answers import Answer, agreement, own_answers
from tests.demo_model.training.corpus import Document, Message, documents
from tests.demo_model.training.network import Network, NetworkConfig
from tests.demo_model.training.train import (
    HELD_OUT_SEED_OFFSET,
    TrainConfig,
    learning_rate_at,
    llama_config,
    make_optimizers,
    row_length_at,
    write_json,
)
from tests.support.paths import DEMO_MODEL

# Of a plain text, so many tokens are the prompt that the model goes on from.
_TEXT_PROMPT = 8
_MAX_ANSWER_TOKENS = 256
_HELD_OUT_EVERY = 20
# As small as other embeddings begin, so that at first everything is as likely.
_INITIAL_STD = 0.02
# Drafts of a step, where its tokens are counted.
_NUM_DRAFTS = 4
DRAFT = DEMO_MODEL / "draft"
WAYS = {
    "greedy": SamplingParams(max_tokens=_MAX_ANSWER_TOKENS, temperature=0.0),
    "temperature 1": SamplingParams(max_tokens=_MAX_ANSWER_TOKENS, temperature=1.0),
    "temperature 0.3, top_p 0.95": SamplingParams(
        max_tokens=_MAX_ANSWER_TOKENS, temperature=0.3, top_p=0.95
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilConfig:
    """num_answers: of the model, to learn from; half of them are greedy, the others drawn at
    temperature 1. num_held_out: answers of each way that the draft is measured with."""

    layers: int
    hidden_size: int
    num_answers: int
    num_held_out: int
    train: TrainConfig


class Teacher:
    """The model whose tokens the draft says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model
        stops = model.generation_config.eos_token_id
        self.stop_ids = tuple(stops if isinstance(stops, list) else [stops])
        self.output_weight: Tensor = model.get_output_embeddings().weight.detach()
        self.max_positions: int = model.config.get_text_config().max_position_embeddings

    def logits(self, token_ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._model(token_ids, use_cache=False).logits
        return logits.float()

    def ids_of(self, document: Document) -> tuple[list[int], list[bool]]:
        """Its tokens, and of each whether the model is to say it."""
        if document.text:
            text: list[int] = self.tokenizer(document.text)["input_ids"]
            return text, [place >= _TEXT_PROMPT for place in range(len(text))]
        messages, ids, is_said = document.messages, list[int](), list[bool]()
        for number, message in enumerate(messages):
            if message.role == "assistant":
                is_said += [False] * (len(self._templated(messages[:number], asks=True)) - len(ids))
                ids = self._templated(messages[: number + 1])
                is_said += [True] * (len(ids) - len(is_said))
        return ids, is_said

    def prompt_of(self, document: Document) -> list[int]:
        """All before the last answer."""
        if document.text:
            return self.ids_of(document)[0][:_TEXT_PROMPT]
        return self._templated(document.messages[:-1], asks=True)

    def _templated(self, messages: Sequence[Message], *, asks: bool = False) -> list[int]:
        template = self.tokenizer.apply_chat_template
        listed = [asdict(message) for message in messages]
        ids: list[int] = template(listed, add_generation_prompt=asks, return_dict=False)
        return ids


def documents_of(file: Path | None, seed: int, *, is_held_out: bool) -> Iterator[Document]:
    """Endless. file: None for the demo model's corpus."""
    if file is None:
        return documents(seed + HELD_OUT_SEED_OFFSET if is_held_out else seed)
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [
        _document(json.loads(line))
        for number, line in enumerate(lines, start=1)
        if (number % _HELD_OUT_EVERY == 0) == is_held_out
    ]
    if not chosen:
        raise SystemExit(f"{file} has {len(lines)} lines; it needs at least {_HELD_OUT_EVERY}")
    return _shuffled(chosen, random.Random(seed))


def _document(line: dict[str, Any]) -> Document:
    if "text" in line:
        return Document(text=line["text"])
    return Document(messages=tuple(Message(m["role"], m["content"]) for m in line["messages"]))


def _shuffled(items: list[Document], rng: random.Random) -> Iterator[Document]:
    while True:
        yield from rng.sample(items, len(items))


def new_draft(teacher: Teacher, config: DistilConfig) -> Network:
    """Its embedding is the model's output layer, in the directions where that varies most."""
    vocab_size, size = teacher.output_weight.shape
    hidden = config.hidden_size
    if hidden > size or hidden % 64:
        raise SystemExit(f"--hidden-size is {hidden}: a multiple of 64 up to the model's {size}")
    head_dim = 32 if hidden < 512 else 64
    network_config = NetworkConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=config.layers,
        num_heads=hidden // head_dim,
        num_kv_heads=hidden // head_dim // 2,
        head_dim=head_dim,
        max_positions=teacher.max_positions,
    )
    draft = Network(network_config)
    weight = teacher.output_weight
    _, directions = torch.linalg.eigh(weight.T @ weight)  # the largest last
    with torch.no_grad():
        reduced = weight @ directions[:, -hidden:]
        draft.model.embed_tokens.weight.copy_(_INITIAL_STD * reduced / reduced.std())
    return draft


def divergence(draft_logits: Tensor, logits: Tensor) -> Tensor:
    """The KL divergence of the draft from the model, in nats per token: logits of (T, vocab)."""
    each = functional.kl_div(
        draft_logits.log_softmax(-1), logits.log_softmax(-1), reduction="none", log_target=True
    )
    return each.sum(-1).mean()


class Distillation:
    def __init__(self, teacher: Teacher, text: Path | None, config: DistilConfig) -> None:
        """text: see `documents_of`."""
        torch.manual_seed(config.train.seed)
        self._teacher, self._text, self._config = teacher, text, config
        self.draft = new_draft(teacher, config)
        self._optimizers = make_optimizers(self.draft, config.train)
        self._source = documents_of(text, config.train.seed, is_held_out=False)
        self._rng = random.Random(config.train.seed)
        self._answers = [
            answer
            for way in ("greedy", "temperature 1")
            for answer in self._own_answers(WAYS[way], self._source, config.num_answers // 2)
        ]

    def run(self) -> None:
        """Leaves the draft as it is saved, in bfloat16's numbers."""
        steps, started_at = self._config.train.steps, time.monotonic()
        assert steps is not None
        for step in range(steps):
            nats = self._train_step(step, step / steps)
            if step % 20 == 19 or step + 1 == steps:
                left = (time.monotonic() - started_at) / (step + 1) * (steps - step - 1)
                print(f"step {step + 1}  {nats:.4f} nats  {left / 60:.1f} minutes left", flush=True)
        with torch.no_grad():
            for parameter in self.draft.parameters():
                parameter.copy_(parameter.bfloat16())

    def measured(self) -> dict[str, dict[str, float]]:
        """How the draft agrees with answers to prompts that it has not learned from."""
        found = {}
        for name, way in WAYS.items():
            source = documents_of(self._text, self._config.train.seed, is_held_out=True)
            answers = self._own_answers(way, source, self._config.num_held_out)
            of_way = agreement(self.draft, answers, _NUM_DRAFTS)
            found[name] = {key: round(value, 4) for key, value in asdict(of_way).items()}
        return found

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stop_ids = self._teacher.stop_ids
        config = llama_config(self.draft.config) | {"eos_token_id": list(stop_ids)}
        write_json(folder / "config.json", config)
        tensors = {
            name: parameter.detach().to(torch.bfloat16).contiguous()
            for name, parameter in self.draft.named_parameters()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if folder.parent != self._teacher.folder:  # where it is known whose tokens it has
            self._teacher.tokenizer.save_pretrained(folder)

    def _own_answers(
        self, way: SamplingParams, source: Iterator[Document], count: int
    ) -> list[Answer]:
        prompts = map(self._teacher.prompt_of, source)
        short = (each for each in prompts if len(each) < self._teacher.max_positions // 2)
        way = replace(way, stop_token_ids=self._teacher.stop_ids)
        return own_answers(self._teacher.folder, list(islice(short, count)), way)

    def _train_step(self, step: int, progress: float) -> float:
        train = self._config.train
        length = min(row_length_at(progress, train), self._teacher.max_positions)
        token_ids, is_said = self._rows(max(1, train.tokens_per_step // length), length)
        logits = self._teacher.logits(token_ids)[is_said]
        nats = divergence(self.draft(token_ids, is_said), logits)
        nats.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = train.learning_rate * learning_rate_at(step, progress)
            optimizer.step()
            optimizer.zero_grad()
        return nats.item()

    def _rows(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids, and whether what follows each is the model's: (count, length) both. A row is
        filled with documents and answers in turn."""
        ids, is_said = [], []
        for _ in range(count):
            row: list[int] = []
            of_row: list[bool] = []
            while len(row) <= length:
                more_ids, more_said = self._next()
                row += more_ids
                of_row += more_said
            ids.append(row[:length])
            is_said.append(of_row[1 : length + 1])
        return torch.tensor(ids), torch.tensor(is_said)

    def _next(self) -> tuple[list[int], list[bool]]:
        if self._answers and self._rng.random() < 0.5:
            answer = self._rng.choice(self._answers)
            is_said = [False] * len(answer.prompt_ids) + [True] * len(answer.token_ids)
            return answer.prompt_ids + answer.token_ids, is_said
        return self._teacher.ids_of(next(self._source))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Distil a draft of a model, on CPUs.")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="its folder")
    parser.add_argument("--text", type=Path, help="JSON lines; see the top of this module")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--answers", type=int, default=512, help="of the model, to learn from")
    parser.add_argument("--held-out", type=int, default=96, help="answers to measure with")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="one is the fastest for tiny models")
    parser.add_argument("--out", type=Path, help="its draft/ by default")
    arguments = parser.parse_args(argv)
    if arguments.text is None and arguments.model != DEMO_MODEL:
        parser.error("--model needs --text: what the model is asked, in its users' words")
    torch.set_num_threads(arguments.threads)
    config = DistilConfig(
        layers=arguments.layers,
        hidden_size=arguments.hidden_size,
        num_answers=arguments.answers,
        num_held_out=arguments.held_out,
        train=TrainConfig(
            seed=arguments.seed,
            steps=arguments.steps,
            tokens_per_step=arguments.tokens_per_step,
            learning_rate=arguments.learning_rate,
        ),
    )
    distillation = Distillation(Teacher(arguments.model), arguments.text, config)
    distillation.run()
    folder = arguments.out or arguments.model / "draft"
    distillation.save(folder)
    record = {
        "config": asdict(config),
        "parameters": distillation.draft.num_parameters,
        "torch": torch.__version__,
        "agreement": distillation.measured(),
    }
    write_json(folder / "training.json", record)
    print(json.dumps(record["agreement"], indent=2))


if __name__ == "__main__":
    main()

"""`python -m tests.formats.odd`: random checkpoints in odd shapes, of all families, answered as
transformers answers them.

    python -m tests.formats.odd --num 1000          a thousand seeds, from 0 on
    python -m tests.formats.odd --first 17 --num 1 --keep DIR
                                                    one, whose checkpoint is kept
    python -m tests.formats.odd --family exaone4    of one family alone
    TRITON_INTERPRET=1 python -m tests.formats.odd --way gpu
                                                    by a GPU's kernels, in Triton's interpreter
    python -m tests.formats.odd --way gguf          from GGUF files, of the families that have some

Each checkpoint (`tests.support.odd_models`) gives greedy answers of 200 tokens and the logprobs of
its prompts: alone, together in chunks of 64, with cached prefixes, preempted, and with drafts; by
the compiled step, by torch's operators, in two ranks or stages. Every token must be the likeliest
of transformers' own, and every logprob the same as its, within 1e-3 in float32. Weights that are
rounded at load are compared with Penstock's other path in place of transformers, and in bfloat16
logprobs differ on average by no more than what is rounded. A model that is not served must be
refused in one line. A seed whose process ends is the last one that is printed.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from penstock.engine.config import Dtype, EngineConfig, Quantization
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.loading.executor import build_executor
from penstock.engine.loading.load import load_executor
from penstock.engine.process.phases import Phases
from penstock.engine.step.executor import Executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.types import Request, RequestId, RequestOutput, SamplingParams
from tests.support.drafting import EveryDraft, Oracle
from tests.support.odd_models import FAMILIES, WAYS, OddModel, write_odd
from tests.support.rank_threads import RankThreads, memberships
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config

NUM_TOKENS = 200
# Of logprobs in float32, and how close two may be that change places.
TOLERANCE = 1e-3
_OF_BFLOAT16 = 0.05  # of logprobs on average, where rounding is not measured
# Weights that differ by so much, relatively, are as good in float32.
_NUDGE, _NUM_NUDGED = 5e-7, 8
_MOST_REFUSED = 600  # characters of a refusal


class WrongAnswer(Exception):
    """Penstock gives other ids or logprobs than transformers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run gave: its name, for people to read; the tokens, and the logprobs of the answer
    and of the prompt but for its first token, or None."""

    run: str
    prompt: tuple[int, ...]
    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float] | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    """computed_by: a way of `WAYS`, "transformers" for one of its classes, or "refused". refused:
    why it is not served, or None. worst: the largest difference of a logprob that is not explained.
    num_unstable: positions at which transformers' own float32 has no such digits."""

    computed_by: str
    refused: str | None = None
    worst: float = 0.0
    num_unstable: int = 0
    was_preempted: bool = False


def examine(model: OddModel, num_tokens: int = NUM_TOKENS) -> Outcome:
    """Raises WrongAnswer."""
    config = engine_config(
        model.served,
        block_size=model.block_size,
        max_model_len=model.max_model_len,
        kv_cache_memory_bytes=(8 if model.way == "gpu" else 256) * 2**20,
        dtype=Dtype.BFLOAT16 if model.way == "bfloat16" else Dtype.FLOAT32,
        quantization=Quantization(model.way) if model.way in set(Quantization) else None,
        tensor_parallel_size=2 if model.way == "ranks" else 1,
        pipeline_parallel_size=2 if model.way == "stages" else 1,
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=8 * _chunk(model)),
    )
    try:
        executor = _executor(config, model.way)
    except PenstockError as error:
        if "\n" in str(error) or len(str(error)) > _MOST_REFUSED:
            raise WrongAnswer(f"refused in an unclear way: {error}") from None
        return Outcome("refused", refused=str(error).replace(str(model.path), "DIR"))
    try:
        info = executor.info
        if set(info.eos_token_ids) != set(model.eos_token_ids):
            raise WrongAnswer(f"ends at {info.eos_token_ids}, not at {model.eos_token_ids}")
        answers, was_preempted = _answers(config, executor, model, num_tokens)
    finally:
        if isinstance(executor, RankThreads):
            executor.close()
    by = model.way
    if info.model_impl != "penstock":
        by = info.model_impl
    elif by != "gpu" and (info.computed_by or "torch").startswith("torch"):
        by = "torch"
    if config.dtype is Dtype.BFLOAT16:
        return Outcome(by, None, _compare_roughly(answers, model), 0, was_preempted)
    theirs: Reference = Transformers(model)
    if config.quantization is not None:
        theirs = ByTorch(config, _executor(config, "torch"))
    return Outcome(by, None, *_compare(answers, theirs), was_preempted)


def _executor(config: EngineConfig, way: str) -> Executor:
    """Raises PenstockError."""
    with ExitStack() as patches:
        # Thousands of weights that are rounded once are not worth a file.
        nowhere = patch("penstock.engine.models.at_load.quantize.cache_directory", _nothing)
        patches.enter_context(nowhere)
        if way == "torch":
            patches.enter_context(patch("penstock.engine.loading.cpu.load_library", _nothing))
        if way == "gpu":
            return load_executor(config, Path(config.model), None, Interpreter(), Phases())
        if way in ("ranks", "stages"):
            return RankThreads(config, memberships(config))
        return build_executor(config, Phases())


def _nothing(*_: Any, **__: Any) -> None:
    return None


# ---- What Penstock answers ----------------------------------------------------------------------


def _chunk(model: OddModel) -> int:
    """How many tokens a step has. Triton's interpreter takes a second for a few."""
    return 8 if model.way == "gpu" else 64


def _prompts(model: OddModel, num_tokens: int) -> list[tuple[int, ...]]:
    """One of several chunks, one of a token, and two more."""
    generator = torch.Generator().manual_seed(model.seed)
    chunk = _chunk(model)
    longest = model.max_model_len - num_tokens - model.seed % 17
    return [
        tuple(torch.randint(model.vocab_size, (count,), generator=generator).tolist())
        for count in (longest, 1, chunk // 2, chunk + 1)
    ]


class _Guesses(Oracle):
    """Drafts of answers that are known, of which a third is wrong."""

    def __init__(self, vocab_size: int, answers: dict[Request, list[int]]) -> None:
        super().__init__(2 / 3)
        self._vocab_size = vocab_size
        for request, ids in answers.items():
            self.learn(request, [ids])

    def _drafts(self, right: list[int]) -> list[int]:
        return [
            each if self._random.random() < self._share else (each + 1) % self._vocab_size
            for each in right
        ]


def _request(prompt: tuple[int, ...], sampling: SamplingParams) -> Request:
    return Request(id=RequestId("0"), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0)


def _answers(
    config: EngineConfig, executor: Executor, model: OddModel, num_tokens: int
) -> tuple[list[Answer], bool]:
    """And whether a sequence was preempted."""
    prompts, chunk = _prompts(model, num_tokens), _chunk(model)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, num_logprobs=0)
    scored = replace(sampling, num_prompt_logprobs=0)
    found: list[Answer] = []

    def run(
        name: str, engine: SteppedEngine, which: list[tuple[int, ...]], how: SamplingParams
    ) -> None:
        outputs = engine.run([_request(prompt, how) for prompt in which])
        found.extend(_answer(name, *pair) for pair in zip(which, outputs, strict=True))

    def engine(
        num_blocks: int | None = None, step_tokens: int = chunk, drafter: Drafter | None = None
    ) -> SteppedEngine:
        limits = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=step_tokens)
        return SteppedEngine(replace(config, scheduler=limits), executor, num_blocks, drafter)

    for prompt in prompts[:2]:
        run("alone", engine(step_tokens=8 * chunk), [prompt], scored)
    together = engine()
    run("together", together, prompts, scored)
    extended = (*prompts[0][:-4], *prompts[2][:3])
    run("with cached prefixes", together, [prompts[0], extended], sampling)
    if not together.scheduler.stats().prefix_hit_tokens_total:
        raise WrongAnswer("no prefix was found")
    scarce = engine(_scarce_blocks(executor, model))
    run("preempted", scarce, [*prompts, extended], sampling)
    was_preempted = scarce.scheduler.stats().preemptions_total > 0
    if executor.info.takes_drafts:
        known = {_request(each.prompt, sampling): each.ids for each in found}
        guesses = _Guesses(model.vocab_size, known)
        run("with drafts", engine(drafter=EveryDraft([guesses], most=5)), prompts[::2], sampling)

    for each in found:
        if len(each.ids) != num_tokens:
            raise WrongAnswer(f"{each.run}: {len(each.ids)} tokens of {num_tokens}")
    ending = replace(sampling, stop_token_ids=executor.info.eos_token_ids)
    run("until it ends", engine(), prompts[:1], ending)
    *others, last = found[-1].ids
    has_ended = last in model.eos_token_ids or len(others) + 1 == num_tokens
    if not has_ended or set(others) & set(model.eos_token_ids):
        raise WrongAnswer(f"ended after {len(others) + 1} tokens: {found[-1].ids}")
    return found, was_preempted


def _answer(name: str, prompt: tuple[int, ...], outputs: list[RequestOutput]) -> Answer:
    of_prompt = next((each.prompt for each in outputs if each.prompt is not None), None)
    logprobs = None if of_prompt is None else of_prompt.logprobs
    return Answer(
        run=name,
        prompt=prompt,
        ids=ids_of(outputs),
        logprobs=[each.logprob for output in outputs for each in output.logprobs or ()],
        prompt_logprobs=None if logprobs is None else [each.logprob for each in logprobs],
    )


def _scarce_blocks(executor: Executor, model: OddModel) -> int:
    """Enough for the longest sequence that there may be, and not for others beside it."""
    groups = executor.info.kv_groups
    most = max(group.most_blocks(model.max_model_len, model.block_size) for group in groups)
    return most + 1 + len(groups)


# ---- What is right ------------------------------------------------------------------------------


class Reference(Protocol):
    """What else computes the same model."""

    def logprobs(self, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of each token but the first, its logprob and that of the likeliest in its place."""
        ...

    def spread(self, tokens: tuple[int, ...], nudge: float = _NUDGE) -> Tensor:
        """By the same tokens, how far both move when weights change by such a share: near a tie of
        two experts, by any amount."""
        ...


class Transformers:
    """The class of transformers, from the same files."""

    def __init__(self, model: OddModel, dtype: torch.dtype = torch.float32) -> None:
        """dtype: to which weights are rounded; all is computed in float32."""
        architecture = json.loads((model.path / "config.json").read_text())["architectures"][0]
        network = getattr(transformers, architecture).from_pretrained(
            model.path, dtype=dtype, attn_implementation="eager"
        )
        self._network = network.float()
        for each in network.modules():  # others want sizes of whole vectors
            config: Any = getattr(each, "config", None)
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = "eager"
        self._length = model.max_model_len

    def logprobs(self, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return _of_tokens(self._all_logprobs(tokens), tokens)

    def spread(self, tokens: tuple[int, ...], nudge: float = _NUDGE) -> Tensor:
        network = self._network
        expected = torch.stack(self.logprobs(tokens))
        spread = torch.zeros(len(tokens) - 1)
        kept = {name: each.clone() for name, each in network.state_dict().items()}
        for seed in range(_NUM_NUDGED):
            generator = torch.Generator().manual_seed(seed)
            for parameter in network.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.mul_(1 + nudge * noise)
            moved = (torch.stack(self.logprobs(tokens)) - expected).abs().amax(0)
            spread = torch.maximum(spread, moved)
            network.load_state_dict(kept)
        return spread

    @torch.inference_mode()
    def _all_logprobs(self, tokens: tuple[int, ...]) -> Tensor:
        """After each of the tokens, (T, vocab_size). They are padded to the longest sequence that
        is served, on which two scalings of rotary positions depend."""
        padding = [0] * (self._length - len(tokens))
        logits: Tensor = self._network(torch.tensor([[*tokens, *padding]]), use_cache=False).logits
        return logits[0, : len(tokens)].float().log_softmax(-1)


class ByTorch:
    """Penstock's own path by torch's operators, of weights that are rounded at load."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._config, self._executor = config, executor

    def logprobs(self, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        scored = SamplingParams(max_tokens=0, temperature=0.0, num_prompt_logprobs=1)
        engine = SteppedEngine(self._config, self._executor)
        ((output,),) = engine.run([_request(tokens, scored)])
        assert output.prompt is not None and output.prompt.logprobs is not None
        each = list(output.prompt.logprobs)
        own, best = [one.logprob for one in each], [one.top[0][1] for one in each]
        return torch.tensor(own), torch.tensor(best)

    def spread(self, tokens: tuple[int, ...], nudge: float = _NUDGE) -> Tensor:
        return torch.zeros(len(tokens) - 1)


def _of_tokens(logprobs: Tensor, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    own = logprobs[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    return own, logprobs[:-1].amax(1)


def _compare(answers: list[Answer], theirs: Reference) -> tuple[float, int]:
    """Returns the largest difference, and how many positions are unstable. Raises WrongAnswer."""
    expected: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    worst, num_unstable = 0.0, 0
    for answer in answers:
        if answer.tokens not in expected:
            expected[answer.tokens] = theirs.logprobs(answer.tokens)
        errors = _errors(answer, *expected[answer.tokens])
        if (errors > TOLERANCE).any():
            unstable = theirs.spread(answer.tokens)
            explained = (errors > TOLERANCE) & (errors <= TOLERANCE + 2 * unstable)
            num_unstable += int(explained.sum())
            errors = errors.masked_fill(explained, 0)
        worst = max(worst, float(errors.max()))
        if not worst <= TOLERANCE:
            position = int((errors > TOLERANCE).nonzero()[0])
            raise WrongAnswer(
                f"{answer.run}: a logprob differs by {float(errors[position]):.1e} at position "
                f"{position} ({len(answer.prompt)} of the prompt), {worst:.1e} at most"
            )
    return worst, num_unstable


def _compare_roughly(answers: list[Answer], model: OddModel) -> float:
    """Returns the largest mean difference of an answer in bfloat16. It is no more than what weights
    of so few digits make of it. Raises WrongAnswer."""
    theirs, worst = Transformers(model, torch.bfloat16), 0.0
    most: dict[tuple[int, ...], float] = {}
    for answer in answers:
        mean = float(_errors(answer, *theirs.logprobs(answer.tokens)).mean())
        if mean > _OF_BFLOAT16 and answer.tokens not in most:
            spread = theirs.spread(answer.tokens, 2.0**-8)
            most[answer.tokens] = _OF_BFLOAT16 + 2 * float(spread.mean())
        if not mean <= most.get(answer.tokens, _OF_BFLOAT16):
            raise WrongAnswer(
                f"{answer.run}: in bfloat16 logprobs differ by {mean:.1e}, where "
                f"{most.get(answer.tokens):.1e} would be rounding"
            )
        worst = max(worst, mean)
    return worst


def _errors(answer: Answer, expected: Tensor, best: Tensor) -> Tensor:
    """Of each token but the first, how far from the likeliest it is where it was chosen, and how
    far what Penstock reports of it is from what is expected; NaN is infinite."""
    first = len(answer.prompt) - 1
    errors = torch.zeros(len(expected))
    chosen = (best - expected)[first:]
    errors[first:] = torch.maximum(chosen, (expected[first:] - torch.tensor(answer.logprobs)).abs())
    if answer.prompt_logprobs is not None:
        errors[:first] = (expected[:first] - torch.tensor(answer.prompt_logprobs)).abs()
    return errors.nan_to_num(torch.inf, posinf=torch.inf)


# ---- The command --------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """0 where no answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.formats.odd", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--num", type=int, default=10)
    parser.add_argument("--tokens", type=int, help="of each answer (default: 200, 5 of a gpu)")
    parser.add_argument("--family", choices=FAMILIES, help="rather than each in turn")
    help_of_way = "how it is computed, rather than drawn; gpu: by Triton's interpreter"
    parser.add_argument("--way", choices=(*WAYS, "gguf", "gpu"), help=help_of_way)
    parser.add_argument("--keep", type=Path, help="a directory for the checkpoints")
    args = parser.parse_args(argv)
    num_tokens = args.tokens or (5 if args.way == "gpu" else NUM_TOKENS)
    if args.way == "gpu" and not os.environ.get("TRITON_INTERPRET"):
        parser.error("--way gpu needs TRITON_INTERPRET=1 in the environment")
    quieten()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    refusals: Counter[str] = Counter()
    wrong = []
    for seed in range(args.first, args.first + args.num):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) if args.keep is None else args.keep / str(seed)
            model = write_odd(seed, path, args.family, args.way)
            print(f"{seed} {model.family}, {model.way}: ", end="", flush=True)
            try:
                outcome = examine(model, num_tokens)
            except WrongAnswer as error:
                print(f"WRONG: {error}", flush=True)
                wrong.append(f"{seed} {model.family}: {error}")
                found[model.family]["wrong"] += 1
                continue
            except Exception as error:
                print(f"FAILED: {type(error).__name__}: {error}", flush=True)
                if args.num == 1:
                    raise
                wrong.append(f"{seed} {model.family}: {type(error).__name__}: {error}")
                found[model.family]["wrong"] += 1
                continue
        gc.collect()
        found[model.family][outcome.computed_by] += 1
        found[model.family]["unstable"] += outcome.num_unstable > 0
        found[model.family]["preempted"] += outcome.was_preempted
        if outcome.refused is not None:
            refusals[f"{model.family}: {outcome.refused}"] += 1
            print(f"refused: {outcome.refused}", flush=True)
        else:
            print(f"{outcome.computed_by}, {outcome.worst:.1e} at most", flush=True)
    _print_table(found)
    for refusal, count in sorted(refusals.items()):
        print(f"{count} refused: {refusal}")
    print("\n".join(wrong) or "no answer was wrong")
    return 1 if wrong else 0


_COLUMNS = (*WAYS, "gguf", "gpu", "transformers", "refused", "wrong", "preempted", "unstable")


def _print_table(found: dict[str, Counter[str]]) -> None:
    print(f"{'family':24}" + "".join(f"{name:>12}" for name in _COLUMNS))
    for family, counts in sorted(found.items()):
        print(f"{family:24}" + "".join(f"{counts[name]:12}" for name in _COLUMNS))
    total = sum(found.values(), Counter())
    print(f"{'all':24}" + "".join(f"{total[name]:12}" for name in _COLUMNS))


def quieten() -> None:
    """transformers warns of settings that are odd on purpose."""
    logs: Any = transformers.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main(sys.argv[1:])
    gc.unfreeze()  # else Triton's bindings, if they were imported, tell what was not freed
    sys.exit(status)

"""Rows of every kind share a step of the GPU's, and each gets what it would get alone."""

import math

import pytest
import torch
from llguidance import LLMatcher

from tests.support.paths import DEMO_MODEL

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.executors.cuda.step_sampler import StepSampler
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.scheduler.types import SamplingParams, SlotAssignment, TokenLogprobs
from tests.support.grammars import prepare
from tests.support.kernels import DEVICE, LOGPROB_TOLERANCE, random

VOCAB_SIZE, EOS = 2048, (2, 0)
PROMPT, SAID = (5, 6, 7), (8, 9)
# One slot each. The last two are what no kernel does, and logprobs.
SAMPLINGS = (
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=1.0),
    SamplingParams(max_tokens=9, temperature=0.8, top_p=0.7, top_k=40),
    SamplingParams(max_tokens=9, temperature=0.7, frequency_penalty=1.5, logit_bias=((3, 2.0),)),
    SamplingParams(
        max_tokens=9,
        temperature=1.0,
        grammar=LLMatcher.grammar_from_regex("[ab]{1,9}"),
        stop_token_ids=EOS,
    ),
    SamplingParams(max_tokens=9, temperature=0.0, bad_words=((8, 9, 10), (9, 11))),
    SamplingParams(max_tokens=9, temperature=0.9, min_p=0.1, num_logprobs=2),
)
SLOTS = tuple(range(len(SAMPLINGS)))


class Step:
    """The sequences of these slots have said SAID after PROMPT, and sample once more."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        grammars = GrammarTable(
            Grammars(GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, EOS)), 8, VOCAB_SIZE
        )
        self.sampler = StepSampler(8, VOCAB_SIZE, DEVICE, grammars)
        tokens = torch.zeros(9, 16, dtype=torch.int32, device=DEVICE)
        for slot in slots:
            sampling = SAMPLINGS[slot]
            ids = PROMPT if sampling.grammar else PROMPT + SAID
            tokens[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            assignment = SlotAssignment(slot, ids, len(PROMPT), ((),), sampling, seed=slot)
            self.sampler.assign(assignment)
            prepare(grammars, sampling)
            grammars.assign(assignment)
        self.sampler.flush()
        self.logits = random(len(SAMPLINGS), VOCAB_SIZE)[list(slots)]
        grammars.start(slots)
        lengths = [len(PROMPT) if SAMPLINGS[s].grammar else len(PROMPT + SAID) for s in slots]
        self.ids = self.sampler.sample_after_graph(
            self.logits,
            list(slots),
            lengths,
            torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            tokens,
        )
        self._slots = list(slots)

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        read = self.sampler.logprobs(self.logits, self._slots, self.ids)
        return None if read is None else read()


@pytest.fixture(scope="module")
def together() -> Step:
    return Step(SLOTS)


@pytest.mark.parametrize("slot", [0, 1, 3, 4, 5])
def test_a_row_gets_the_id_that_it_gets_alone(together: Step, slot: int) -> None:
    assert Step((slot,)).ids.tolist() == [together.ids[slot].item()]


def test_a_grammar_a_bad_word_and_a_greedy_row_are_obeyed(together: Step) -> None:
    ids = together.ids.tolist()
    assert ids[0] == together.logits[0].argmax().item()
    others = together.logits[5].clone()
    others[11] = -math.inf
    assert 11 != ids[5] == others.argmax().item()
    grammars = Grammars(GrammarCompiler(DEMO_MODEL, VOCAB_SIZE, EOS))
    grammar = SAMPLINGS[4].grammar
    assert grammar and grammars.compile(grammar).result().deep_copy().consume_token(ids[4])


def test_logprobs_come_for_the_rows_that_want_them_alone(together: Step) -> None:
    logprobs = together.logprobs()
    assert logprobs is not None and logprobs[:-1] == [None] * (len(SLOTS) - 1)
    entry = logprobs[-1]
    expected = together.logits[-1].log_softmax(-1)
    assert entry and entry.logprob == pytest.approx(
        expected[together.ids[-1]].item(), abs=LOGPROB_TOLERANCE
    )
    assert [i for i, _ in entry.top] == expected.topk(2).indices.tolist()


def test_a_graph_samples_all_but_rows_with_a_grammar_penalties_or_without_a_kernel(
    together: Step,
) -> None:
    modes = [together.sampler.graph_mode([slot]) for slot in SLOTS]
    filtered = Mode.FILTERED
    assert modes == [Mode.PLAIN, Mode.PLAIN, filtered, None, None, None, filtered]
    assert together.sampler.graph_mode([0, 2]) is Mode.FILTERED
    assert together.sampler.graph_mode([0, 4]) is None

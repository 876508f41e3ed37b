"""Drafts on a device that verifies so many tokens, of requests that it can."""

from typing import Any

import pytest

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.limits import DraftLimits
from penstock.scheduler.drafts.sources import Found
from penstock.scheduler.stats import GraphSizes
from penstock.scheduler.types import SamplingParams
from tests.support.drafting import EveryDraft
from tests.support.scheduling import make_request


class _Sixes:
    """Always has many drafts."""

    name = "sixes"

    def find(self, sequence: Sequence) -> Found:
        return Found([6] * 20, 0, 16)

    def end(self, sequence: Sequence) -> None:
        pass


def _nums(limits: DraftLimits, num_decodes: int, most: int = 100) -> list[int]:
    drafter = EveryDraft([_Sixes()], 12, limits=limits)
    decodes = [Sequence(make_request(str(i), 5), 0, i, 100) for i in range(num_decodes)]
    return [len(drafts) for drafts in drafter.propose(decodes, [50] * num_decodes, most)]


def test_a_step_has_no_more_tokens_than_the_device_verifies_at_once() -> None:
    assert _nums(DraftLimits(16, 7), 1) == [7]
    assert _nums(DraftLimits(16, 7), 3) == [7, 6, 0]
    assert _nums(DraftLimits(16, 7), 3, most=4) == [4, 0, 0]
    assert _nums(DraftLimits(16, 7), 16) == [0] * 16
    assert _nums(DraftLimits(16, 7), 20) == [0] * 20


@pytest.mark.parametrize(
    "way",
    [
        {"grammar": "start: /a/"},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((3, 1.0),)},
        {"bad_words": ((3,),)},
        {"allowed_token_ids": (3,)},
        {"min_tokens": 1},
    ],
)
def test_what_is_applied_to_one_position_of_a_row_has_none(way: dict[str, Any]) -> None:
    limits = DraftLimits(16, 7)
    assert not limits.takes(SamplingParams(max_tokens=9, **way))
    assert limits.takes(SamplingParams(max_tokens=9, top_p=0.5, top_k=3, min_p=0.1, num_logprobs=3))


def test_a_step_with_drafts_is_padded_to_sizes_of_its_own() -> None:
    sizes = GraphSizes(decodes=(1, 2, 4), chunks=(64,), drafts=(8, 16))
    assert sizes.padding(3, has_chunks=False) == 1
    assert sizes.padding(3, has_chunks=False, has_drafts=True) == 5
    assert sizes.padding(17, has_chunks=False, has_drafts=True) == 0

"""The short form of `make test-chaos`, with scripted tokens, which start in a moment."""

import pytest

from penstock.engine.config import SpeculativeConfig
from tests.chaos.crowds import overload
from tests.chaos.disconnects import leave_early
from tests.chaos.every_step import kill_at_every_step
from tests.chaos.kills import answers_of, kill_under_load
from tests.chaos.load import joined, predicting, repeating
from tests.chaos.pause import pause_s
from tests.chaos.poison import poison_among_others
from tests.chaos.server import running
from tests.chaos.tier_files import damage_files
from tests.support.compiler import needs_compiler

DRAFTING = "tests.support.drafting_engine"


async def test_no_stream_of_any_kind_differs_after_a_kill_at_any_of_the_first_steps() -> None:
    async with running(scripted=True) as server:
        outcome = await kill_at_every_step(server, num_streams=16, max_steps=2)
        assert not outcome.different and outcome.num_kills == 2
        assert await server.blocks_in_use() == 0


def test_no_answer_differs_after_files_of_its_blocks_were_damaged() -> None:
    outcome = damage_files(8, seed=1, num_prompts=4, num_threads=1)
    assert (outcome.num_different, outcome.num_found) == (0, 8)
    assert outcome.num_hits > 250


@pytest.mark.slow
async def test_an_engine_that_replaces_another_computes_no_prompt_again() -> None:
    async with running() as server:
        assert await pause_s(server, 1, num_streams=4, num_prompt_tokens=1000) > 0
        assert server.engine.recovery.num_resumed == 4
        # Of each stream the block that it was writing to, and the step that was lost.
        assert 0 < server.service.metrics.stats.recomputed_tokens_total <= 4 * (16 + 2)


@pytest.mark.slow
async def test_no_stream_of_any_kind_differs_after_kills_of_its_engine() -> None:
    async with running(scripted=True) as server:
        outcome = await kill_under_load(server, num_kills=4, num_streams=16, seed=1, max_steps=12)
        assert not outcome.different and outcome.num_kills == 4
        assert await leave_early(server, num_clients=50, seed=1) == 0
        assert server.service.metrics.stats.num_running == 0


@pytest.mark.slow
async def test_a_request_that_raises_is_one_error_and_the_others_are_unharmed() -> None:
    result = await poison_among_others("raises", num_others=16, scripted=True)
    assert result.is_good and result.code == "request_ended_engine", result
    assert result.num_quarantined == 1


@needs_compiler
@pytest.mark.slow
async def test_answers_with_drafts_are_those_of_a_quiet_server_without_after_kills() -> None:
    load = [ask for number in range(2) for ask in repeating(number, max_tokens=40)]
    chats = [ask for ask in load if ask.kind == "chat"]
    async with running(speculative=SpeculativeConfig(num_speculative_tokens=0)) as plain:
        answered = await answers_of(plain, chats)
        load += map(predicting, chats, answered)
        expected = await answers_of(plain, load)
        assert not plain.service.metrics.stats.drafts
    async with running(DRAFTING) as server:
        outcome = await kill_under_load(
            server,
            num_kills=5,
            num_streams=0,
            seed=1,
            max_steps=12,
            known=(load, expected),
        )
        assert not outcome.different and outcome.num_kills == 5
        assert await server.blocks_in_use() == 0
        accepted = {
            each.source: each.num_accepted_tokens for each in server.service.metrics.stats.drafts
        }
        assert all(accepted[source] > 0 for source in ("grammar", "prediction", "ngram")), accepted


@needs_compiler
@pytest.mark.slow
async def test_answers_with_drafts_are_the_same_where_the_pool_is_too_small() -> None:
    result = await overload(40, module=DRAFTING)
    assert not result.outcome.different and result.num_preemptions and not result.num_left


@pytest.mark.slow
async def test_a_request_that_raises_harms_none_of_those_that_have_drafts() -> None:
    result = await poison_among_others("raises", num_others=8, module=DRAFTING, scripted=True)
    assert result.is_good and result.code == "request_ended_engine", result


def test_the_comparison_sees_a_lost_and_a_doubled_token() -> None:
    def chunks(*texts: str) -> list[object]:
        return [{"choices": [{"index": 0, "text": text}]} for text in texts]

    whole = list(joined(chunks("a", "b", "c")))
    assert list(joined(chunks("ab", "c"))) == whole
    assert list(joined(chunks("a", "c"))) != whole
    assert list(joined(chunks("a", "b", "b", "c"))) != whole

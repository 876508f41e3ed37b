"""Where prompts are computed whole, each is one row of one step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Pooling, PromptOutput, SampledTokens
from tests.support.scheduling import make_request

MOST = 32


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, MOST), min_size=1, max_size=30))
def test_no_prompt_is_divided_and_all_end(lengths: list[int]) -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=MOST, enable_prefix_caching=False),
        groups=[KVGroup(64)],
        block_size=4,
        max_model_len=MOST,
        computes_whole=True,
    )
    for number, length in enumerate(lengths):
        request = make_request(str(number), length, max_tokens=0, pooling=Pooling.FIRST)
        scheduler.add(request, now=0.0)
    computed: list[int] = []
    for _ in range(2 * len(lengths)):
        batch = scheduler.schedule(0.0)
        if batch is None:
            break
        assert set(batch.starts) == {0}
        assert sum(batch.num_tokens) <= MOST
        computed += batch.num_tokens
        outputs = tuple(PromptOutput(None, b"") for _ in batch.slots)
        scheduler.update(SampledTokens(step=batch.step, token_ids=[], prompts=outputs))
    assert computed == lengths
    assert not scheduler.has_work

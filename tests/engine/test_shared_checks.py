"""What executors share: block copies within the device, and requests that they cannot run."""

import pytest

from penstock.engine.errors import UnknownAdapter
from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.engine.step.executor import check_no_adapter, device_copies
from penstock.scheduler.types import BlockCopy, ScheduledBatch, Tier
from tests.support.scheduling import make_request
from tests.support.tiny_models import make_batch


def copying(*copies: BlockCopy) -> ScheduledBatch:
    return make_batch((), (), (), copies=copies)


def test_copies_within_the_device_are_pairs_of_source_and_target() -> None:
    assert device_copies((BlockCopy(4, 8), BlockCopy(1, 2))) == [(4, 8), (1, 2)]


@pytest.mark.parametrize(
    "copy",
    [
        BlockCopy(4, 8, source_tier=Tier.HOST),
        BlockCopy(4, 8, target_tier=Tier.HOST),
        BlockCopy(4, 8, Tier.HOST, Tier.HOST),
    ],
)
def test_a_copy_that_leaves_the_device_is_rejected_by_name(copy: BlockCopy) -> None:
    with pytest.raises(AssertionError, match=r"on the device alone.*HOST"):
        device_copies((BlockCopy(1, 2), copy))
    with pytest.raises(AssertionError, match="on the device alone"):
        ScriptedExecutor(scripted_info()).execute(copying(copy))


def test_a_request_with_an_adapter_is_refused_by_name() -> None:
    check_no_adapter(make_request("a", 5))
    with pytest.raises(UnknownAdapter, match="no adapter 'french'"):
        check_no_adapter(make_request("a", 5, adapter="french"))

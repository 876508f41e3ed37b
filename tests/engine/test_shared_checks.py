"""What executors share: block copies within the device, and requests that they cannot run."""

import pytest

from penstock.engine.errors import UnknownAdapter
from penstock.engine.step.executor import block_copies, check_no_adapter
from penstock.scheduler.types import BlockCopy
from tests.support.scheduling import make_request


def test_copies_are_those_of_one_group() -> None:
    copies = (BlockCopy(4, 8), BlockCopy(1, 2), BlockCopy(5, 6, group=1))
    assert block_copies(copies) == [(4, 8), (1, 2)]
    assert block_copies(copies, 1) == [(5, 6)]


def test_a_request_with_an_adapter_is_refused_by_name() -> None:
    check_no_adapter(make_request("a", 5))
    with pytest.raises(UnknownAdapter, match="no adapter 'french'"):
        check_no_adapter(make_request("a", 5, adapter="french"))

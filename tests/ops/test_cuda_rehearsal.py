"""The GPU's executor through a long random schedule, on a GPU that computes nothing."""

from typing import Any

import pytest

from tests.support.run_rehearsal import check_serving, rehearsal


@pytest.mark.parametrize("flags", [(), ("--enforce-eager",), ("qwen2",), ("qwen3",)])
def test_a_long_schedule_with_preemptions_breaks_no_rule_of_the_device(flags: Any) -> None:
    report = rehearsal("3", *flags)
    check_serving(report)
    assert report["preemptions"] > 0

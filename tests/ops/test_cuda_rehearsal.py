"""The CUDA executor through a long random schedule, on a simulated GPU that computes nothing."""

from typing import Any

import pytest

from tests.support.run_rehearsal import check_serving, rehearsal

# Weights in them.
CODES = (("codes-int4",), ("codes-fp8", "--enforce-eager"))


@pytest.mark.parametrize(
    "flags", [(), ("--enforce-eager",), ("qwen2",), ("qwen3",), ("fp8",), *CODES]
)
def test_a_long_schedule_with_preemptions_violates_no_device_rule(flags: Any) -> None:
    report = rehearsal("3", *flags)
    check_serving(report)
    assert report["preemptions"] > 0

"""When an engine counts as stalled, by numbers alone."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.executors.scripted import scripted_info
from penstock.engine.ipc.stall import Silence, stall_limit_s
from penstock.scheduler.config import SchedulerConfig

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=1000)
# 1,000 tokens at the end of 2,048: 2e12 operations in the linear layers, and 2e12 in attention.
INFO = replace(
    scripted_info(),
    flops_per_token=2 * 10**9,
    attention=(replace(scripted_info().attention[0], flops_per_pair=10**6),),
)


def test_a_fast_machine_has_the_time_of_the_flag() -> None:
    info = replace(INFO, measured_flops_per_s=1e15)
    assert stall_limit_s(120.0, info, CONFIG, has_stepped=True) == 120.0
    assert stall_limit_s(120.0, scripted_info(), CONFIG, has_stepped=True) == 120.0


def test_a_slow_machine_has_ten_times_its_longest_step() -> None:
    limit_s = stall_limit_s(
        120.0, replace(INFO, measured_flops_per_s=1e11), CONFIG, has_stepped=True
    )
    assert 400 < limit_s < 420


def test_the_measured_speed_counts_before_the_datasheets() -> None:
    info = replace(INFO, peak_flops_per_s=1e15, measured_flops_per_s=1e11)
    assert stall_limit_s(120.0, info, CONFIG, has_stepped=True) > 120.0


def test_the_first_step_may_take_ten_minutes() -> None:
    assert stall_limit_s(5.0, INFO, CONFIG, has_stepped=False) == 600.0


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=30))
def test_silence_is_never_longer_than_the_time_since_the_last_sign(
    looks: list[tuple[float, bool]],
) -> None:
    silence, now_s, sign, sign_s = Silence(1.0), 0.0, 0, 0.0
    silence.look(now_s, sign)
    for gap_s, is_alive in looks:
        now_s += gap_s
        if is_alive:
            sign, sign_s = sign + 1, now_s
        assert 0 <= silence.look(now_s, sign) <= now_s - sign_s + 1e-9


def test_time_in_which_the_server_was_stopped_is_not_silence() -> None:
    silence = Silence(0.5)
    for now_s in (0.0, 0.5, 1.0, 301.0, 301.5):
        seconds = silence.look(now_s, "no sign")
    assert seconds == 0.5 + 0.5 + 1.0 + 0.5

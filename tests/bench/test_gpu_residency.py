"""Early starts of kernels made by hand, of which one can say who has room when."""

import pytest

from tests.bench.gpu.residency import Grid, Started, started
from tests.support.multiprocessor import WHOLE, Room, room_of

NUM_SMS, RELEASE, START = 4, 0.5, 1.25
SMALL = room_of(warps=4, registers=32, shared_bytes=0)
THIRD = room_of(warps=4, registers=32, shared_bytes=70_000)
ALL_REGISTERS = room_of(warps=8, registers=255, shared_bytes=0)


def grid(programs: int, room: Room, us: float = 10.0, busy: int | None = None) -> Grid:
    return Grid(programs=programs, busy=programs if busy is None else busy, room=room, us=us)


def second(*grids: Grid) -> Started:
    return started(grids, release=RELEASE, start=START, num_sms=NUM_SMS)[1]


def test_a_kernel_that_fills_all_registers_lets_nothing_start_early() -> None:
    assert WHOLE.times(ALL_REGISTERS) == 1
    found = second(grid(NUM_SMS, ALL_REGISTERS), grid(NUM_SMS, SMALL))
    assert found.gap == pytest.approx(START)
    assert found.early == 0


def test_a_tiny_kernel_starts_while_a_wave_of_another_runs() -> None:
    found = second(grid(2 * NUM_SMS, THIRD), grid(NUM_SMS, SMALL))
    assert found.gap == pytest.approx(RELEASE)
    assert found.early == NUM_SMS


def test_it_may_not_start_before_a_second_wave_has() -> None:
    """Three programs each, and one of a second wave for which their places must be free."""
    ending = [grid(3 * NUM_SMS + more, THIRD, us=4 / 3 + 0.3) for more in (0, 1)]
    # Of one wave, all started at once; places for four programs of 32 warps are there all the time.
    assert second(ending[0], grid(NUM_SMS, SMALL)).early == NUM_SMS
    late = second(ending[1], grid(NUM_SMS, SMALL))
    assert late.early == 0
    assert RELEASE < late.gap < START


def test_programs_that_get_places_on_a_part_of_the_device_start_early_there() -> None:
    found = second(grid(NUM_SMS - 1, ALL_REGISTERS), grid(NUM_SMS, ALL_REGISTERS))
    assert found.gap == pytest.approx(START)
    assert found.early == 1


def test_programs_that_find_nothing_to_do_leave_their_places() -> None:
    busy_and_idle = grid(3 * NUM_SMS, THIRD, busy=NUM_SMS)
    found = second(busy_and_idle, grid(2 * NUM_SMS, THIRD))
    assert found.gap == pytest.approx(RELEASE)
    assert found.early == 2 * NUM_SMS


def test_a_launch_may_wait_beside_two_before_it_if_they_leave_room() -> None:
    few = grid(1, THIRD)
    found = started([few, few, few, few], release=RELEASE, start=START, num_sms=1)
    # Three have room together, so the fourth waits for the first to end, and has time for it.
    assert [each.early for each in found] == [0, 1, 1, 1]
    assert [each.gap for each in found[1:]] == pytest.approx([RELEASE] * 3)


@pytest.mark.parametrize("waves", [1, 3, 4, 7, 100])
def test_a_launch_of_many_waves_takes_as_long_as_it_is_given(waves: int) -> None:
    found = second(grid(1, SMALL), grid(waves * NUM_SMS, THIRD))
    assert found.gap == pytest.approx(RELEASE)


def test_of_many_waves_the_last_ones_decide_what_may_start_early() -> None:
    for per_sm in (13, 3001):  # the last wave has a third of the programs that have room
        long = grid(per_sm * NUM_SMS, THIRD, us=5.0 * per_sm)
        assert second(long, grid(3 * NUM_SMS, THIRD)).early == 2 * NUM_SMS
        short = grid(per_sm * NUM_SMS, THIRD, us=0.1 * per_sm)
        assert second(short, grid(3 * NUM_SMS, THIRD)).early == 0

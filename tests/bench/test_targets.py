"""What `python -m tests.bench.targets` finds, on a short load of the small server."""

from penstock.scheduler.config import SchedulerConfig
from tests.bench.targets import Shape, flooded, small_server


def test_a_quiet_key_hardly_waits_longer_beside_a_flood_and_it_costs_little() -> None:
    server = small_server(SchedulerConfig(max_num_seqs=16))
    made = flooded("small", server, Shape((100, 200, 400), (20, 80)), 18, seed=0)
    assert made["small_over_alone"] <= 1.5
    assert made["small_ttft_p99_ms_fcfs"] > 20 * made["small_ttft_p99_ms_fair"]
    assert made["small_tokens_per_s_fair"] >= 0.95 * made["small_tokens_per_s_fcfs"]
    assert made["small_flood_itl_max_ms_fair"] < 5_000  # of a sequence that was preempted

"""Simulations whose results can be computed by hand, the routers, and the command."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.bench.config import bench_config
from penstock.loadtest.bench.flags import make_parser
from penstock.loadtest.bench.http_target import TargetConfig
from penstock.loadtest.bench.results import settings_of
from penstock.loadtest.calibrate.calibration import Calibration, FrontEnd
from penstock.loadtest.calibrate.drafts import DraftsAssumed
from penstock.loadtest.report.report import ReportConfig, summarize
from penstock.loadtest.simulate.cli import main
from penstock.loadtest.simulate.outcome import RunClass, run_class, summary_of
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.simulation import Plan, Simulated, simulate
from penstock.loadtest.workload.workload import TimedRequest, make_prompt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.routing import RouterPolicy
from penstock.scheduler.step_model.fit import fit
from tests.loadtest.simulate.test_same_decisions import make_info
from tests.support.made_up_steps import DEVICE, HOST, made_up_steps

STEP_S, HOST_S, TOKEN_S, KV_S, SEQUENCE_S = DEVICE[0], HOST[0], DEVICE[2], DEVICE[4], DEVICE[7]


def requests_at(times: list[float], *, prompt: int = 8, output: int = 4) -> list[TimedRequest]:
    return [
        TimedRequest(
            index=index,
            arrival_s=at_s,
            prompt=make_prompt(str(index), prompt, 500),
            num_prompt_tokens=prompt,
            max_tokens=output,
        )
        for index, at_s in enumerate(times)
    ]


def make_plan(*, runs_ahead: bool = False, num_blocks: int = 200, **changes: Any) -> Plan:
    info = make_info(num_blocks, runs_ahead=runs_ahead)
    model = fit(list(made_up_steps(400, runs_ahead=runs_ahead)), runs_ahead=runs_ahead)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    server = SimulatedServer(info, model, config, **changes.pop("server", {}))
    return Plan(server=server, seed=None, **changes)


def test_a_single_request_takes_the_sum_of_its_steps() -> None:
    plan = make_plan(server={"front_end": FrontEnd(request_s=0.2, delay_s=0.3)})
    (result,) = simulate(plan, requests_at([3.0])).observed.results
    model, info = plan.server.step_model, plan.server.info
    assert result.sent_s == 3.0 and result.num_output_tokens == 4
    # By the known coefficients; the fit is within 2 % of them.
    first_s = STEP_S + 8 * TOKEN_S + HOST_S
    assert result.ttft_s == pytest.approx(0.5 + first_s, rel=0.02)
    assert result.tpot_s == pytest.approx(STEP_S + TOKEN_S + HOST_S + SEQUENCE_S, rel=0.05)
    assert model.runs_ahead is info.runs_ahead is False


def test_a_simulated_steps_work_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the executor: the loop, which would count it again, has nothing to count with."""
    plan = make_plan()
    counted = simulate(plan, requests_at([0.0, 0.1], output=9))
    monkeypatch.delattr("penstock.engine.step.loop.work_of")
    assert simulate(plan, requests_at([0.0, 0.1], output=9)).steps == counted.steps
    assert all(step.flops > 0 for step in counted.steps[0])


def test_requests_and_tokens_wait_for_the_one_thread_of_the_front_end() -> None:
    costs = FrontEnd(request_s=1.0, report_s=0.25, token_s=0.125)
    plan = make_plan(server={"front_end": costs})
    first, second = simulate(plan, requests_at([0.0, 0.5], output=3)).observed.results
    # The engine takes milliseconds, so only the front end's turns count: the first request's from 0
    # to 1, the second's to 2, meanwhile the first token waits; each is then written on its own.
    assert first.arrivals_s[0] == pytest.approx(2.375, abs=0.05)
    # What the engine made meanwhile is written in the order in which it came.
    assert first.arrivals_s[1] == pytest.approx(2.75, abs=0.05)
    assert first.arrivals_s < second.arrivals_s
    alone = simulate(plan, requests_at([0.0], output=3)).observed.results[0]
    assert alone.arrivals_s[0] == pytest.approx(costs.idle_s, abs=0.05)
    assert alone.arrivals_s[2] == pytest.approx(1.0 + 3 * 0.375, abs=0.05)


def test_the_tokens_of_one_step_are_written_one_after_the_other() -> None:
    plan = make_plan(server={"front_end": FrontEnd(token_s=0.5)})
    results = simulate(plan, requests_at([0.0] * 4, output=1)).observed.results
    gaps = [b - a for a, b in itertools.pairwise(sorted(each.ended_s for each in results))]
    assert gaps == pytest.approx([0.5] * 3, abs=0.02)


def test_the_host_hides_behind_a_device_that_runs_ahead() -> None:
    times = {}
    for runs_ahead in (False, True):
        plan = make_plan(runs_ahead=runs_ahead)
        (result,) = simulate(plan, requests_at([0.0], output=20)).observed.results
        times[runs_ahead] = result.tpot_s or 0.0
    assert times[False] - times[True] == pytest.approx(HOST_S, rel=0.2)


def test_a_limited_concurrency_sends_the_next_request_when_one_has_ended() -> None:
    results = simulate(make_plan(max_concurrency=2), requests_at([0.0] * 6)).observed.results
    ends = sorted(result.ended_s for result in results)
    sent = sorted(result.sent_s for result in results)
    assert sent[:2] == [0.0, 0.0] and sent[2:] == ends[:4]
    assert all(result.ttft_s < 0.01 for result in results)  # from when it was sent


def test_two_replicas_serve_twice_as_much() -> None:
    load = requests_at([0.0] * 64, output=30)
    one, two = (simulate(make_plan(num_replicas=num), load).observed.duration_s for num in (1, 2))
    assert one == pytest.approx(2 * two, rel=0.1)


def test_a_request_that_finds_the_queue_full_is_refused_as_a_server_would() -> None:
    simulated = simulate(make_plan(server={"max_num_queued_reqs": 4}), requests_at([0.0] * 15))
    assert [result.status for result in simulated.observed.failed] == [429] * 3
    assert len(simulated.observed.completed) == 12


def test_a_prompt_that_the_model_does_not_take_is_refused() -> None:
    simulated = simulate(make_plan(), requests_at([0.0], prompt=200))
    (failed,) = simulated.observed.failed
    assert failed.error is not None and "the prompt has 200 tokens" in failed.error


def simulated_at(load: float) -> Simulated:
    """At this share of the rate that eight sequences at once carry."""
    plan = make_plan()
    step_s = STEP_S + HOST_S + 8 * (TOKEN_S + SEQUENCE_S) + 8 * 20 * 1000 * KV_S
    rate = load * 8 / (20 * step_s)
    return simulate(plan, requests_at([index / rate for index in range(600)], output=20))


def test_a_run_is_called_stable_or_overloaded() -> None:
    assert run_class(simulated_at(0.3)) is RunClass.STABLE
    assert run_class(simulated_at(2.0)) is RunClass.OVERLOADED


def test_a_burst_that_is_served_in_the_end_is_a_backlog() -> None:
    load = requests_at([0.01 * index for index in range(10)] + [0.2] * 60 + [3.0 + index for index
                       in range(10)], output=30)  # fmt: skip
    assert run_class(simulate(make_plan(), load)) is RunClass.BACKLOGGED


def test_prompts_that_were_sent_before_are_found_in_the_prefix_cache() -> None:
    prompt = make_prompt("same", 40, 500)
    load = [
        TimedRequest(
            index=index, arrival_s=float(index), prompt=prompt, num_prompt_tokens=40, max_tokens=4
        )
        for index in range(4)
    ]
    plan = make_plan()
    simulated = simulate(plan, load)
    cached = [result.num_cached_tokens for result in simulated.observed.results]
    assert cached == [0, 36, 36, 36]
    summary = summary_of(plan, simulated, ReportConfig())
    assert summary["prefix_hit_ratio"] == pytest.approx(0.675)
    assert 0 < summary["kv_peak"] < 0.1 and summary["preemptions"] == 0


def test_a_router_that_knows_prefixes_has_more_hits() -> None:
    """Conversations of eight turns: each turn's prompt begins with the one before."""
    load: list[TimedRequest] = []
    for turn in range(8):
        for chat in range(12):
            ids = make_prompt(f"chat {chat}", 8 * (turn + 2) + 64, 500)[: 8 * (turn + 1) + 20]
            load.append(
                TimedRequest(
                    index=len(load), arrival_s=turn + 0.011 * chat, prompt=ids,
                    num_prompt_tokens=len(ids), max_tokens=4,
                )
            )  # fmt: skip
    hits = {}
    for policy in (RouterPolicy.ROUND_ROBIN, RouterPolicy.PREFIX_AWARE):
        plan = make_plan(num_replicas=5, router=policy, num_blocks=400)
        hits[policy] = summary_of(plan, simulate(plan, load), ReportConfig())["prefix_hit_ratio"]
    assert hits[RouterPolicy.PREFIX_AWARE] > 1.3 * hits[RouterPolicy.ROUND_ROBIN]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_drafts_are_accepted_as_often_as_is_assumed_and_answers_keep_their_length(
    runs_ahead: bool,
) -> None:
    drafts = DraftsAssumed((0.9, 0.6) if not runs_ahead else (0.9,), 0.7)
    plan = make_plan(runs_ahead=runs_ahead, server={"drafts": drafts})
    load = requests_at([0.0] * 3, output=90) + requests_at([9.0] * 60, output=90)[3:]
    simulated = simulate(plan, load)
    assert [each.num_output_tokens for each in simulated.observed.results] == [90] * len(load)
    *_, stats = simulated.stats[0].drafts
    shares = [a / b for a, b in zip(stats.accepted, stats.reached, strict=False)]
    if runs_ahead:  # the first is after one or more ids that are right as often
        assert 0.5 < shares[0] < 0.85 and shares[1] == pytest.approx(0.9, abs=0.05)
    else:
        assert shares[:2] == pytest.approx([0.9, 0.6], abs=0.05)
    assert stats.num_accepted_tokens > 100


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_drafts_that_are_right_make_answers_faster_and_those_that_are_wrong_do_not(
    runs_ahead: bool,
) -> None:
    load = requests_at([0.0], output=90)
    tpots = []
    for drafts in (None, DraftsAssumed((1.0,)), DraftsAssumed((0.001,))):
        plan = make_plan(runs_ahead=runs_ahead, server={"drafts": drafts})
        (result,) = simulate(plan, load).observed.results
        tpots.append(result.tpot_s or 0.0)
    plain, right, wrong = tpots
    assert right < 0.5 * plain and plain < wrong < 1.05 * plain


def test_a_seed_draws_the_same_drafts_again() -> None:
    plan = make_plan(server={"drafts": DraftsAssumed((0.7,))})
    load = requests_at([0.0, 0.1], output=60)
    runs = [simulate(replace(plan, seed=seed), load).steps for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    plan = make_plan()
    path = tmp_path / "calibration.json"
    Calibration(
        name="tiny",
        source="made-up steps",
        date="20260101-000000",
        version="0",
        model=replace(plan.server.info, takes_drafts=True),
        scheduler=plan.server.scheduler,
        step_model=plan.server.step_model,
        front_end=FrontEnd(request_s=0.001),
    ).write(path)
    return path


FLAGS = ["--random-input-len", "20", "--random-output-len", "10", "--seed", "1", "--disable-tqdm"]


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*FLAGS, *flags, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_simulation_has_every_key_of_a_measurement(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--num-prompts", "20", "--request-rate", "50"]
    config = bench_config(make_parser().parse_args([*FLAGS, *load]), None)
    settings = settings_of(config, TargetConfig(base_url="", model="tiny"))
    observed = simulate(make_plan(), requests_at([0.0])).observed
    measured = settings | summarize(observed, config.report)
    simulated = run(capsys, *load, "--calibration", str(calibration))
    assert set(measured) <= set(simulated)
    assert simulated["completed"] == 20 and simulated["total_output_tokens"] == 200
    low, high = simulated["error_bars"]["mean_tpot_ms"]
    assert low <= simulated["mean_tpot_ms"] <= high


def test_the_text_has_the_layout_of_bench_and_error_bars(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    flags = ["--calibration", str(calibration), "--num-prompts", "30", "--request-rate", "100"]
    assert main([*FLAGS, *flags, "--replicas", "2", "--report", str(page)]) == 0
    shown = capsys.readouterr()
    assert "============ Serving Benchmark Result ============" in shown.out
    for words in ("Median TTFT (ms):", "Run class:", "KV blocks used at most", "Preemptions:",
                  "CPU time of a simulated step (us):", "Times as fast as real time:"):  # fmt: skip
        assert words in shown.out
    assert "calibrated on made-up steps" in shown.err
    html = page.read_text()
    assert "tiny: simulation of" in html and "KV blocks in use over time" in html


def test_other_limits_than_the_calibrated_ones_are_simulated(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--calibration", str(calibration), "--num-prompts", "60", "--no-error-bars"]
    wide, narrow = (run(capsys, *flags, "--max-num-seqs", str(num)) for num in (16, 2))
    assert wide["output_throughput"] > 3 * narrow["output_throughput"]


def test_a_recording_is_simulated_at_its_own_times(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "recording.json"
    lengths = {"input_lens": [20, 30, 10], "output_lens": [5, 0, 7]}
    recording.write_text(json.dumps(lengths | {"start_times": [100.0, 101.0, 104.0]}))
    made = run(capsys, "--calibration", str(calibration), "--dataset-name", "recording",
               "--dataset-path", str(recording))  # fmt: skip
    assert made["completed"] == 2 and made["total_output_tokens"] == 12
    assert made["duration"] == pytest.approx(4.0, abs=0.1)


def test_the_acceptance_of_drafts_is_that_of_the_flag_or_of_the_calibration(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--calibration", str(calibration), "--num-prompts", "30", "--max-concurrency", "1"]
    plain = run(capsys, *flags)
    assert plain["num_draft_tokens"] == 0
    given = run(capsys, *flags, "--acceptance", "0.9", "0.8")
    assert 0 < given["num_accepted_draft_tokens"] < given["num_draft_tokens"]
    assert given["mean_tpot_ms"] < plain["mean_tpot_ms"]
    read = Calibration.read(calibration)
    replace(read, drafts=DraftsAssumed((0.9, 0.8), 0.5)).write(calibration)
    calibrated = run(capsys, *flags)["num_draft_tokens"]
    assert 0 < calibrated < given["num_draft_tokens"]
    assert run(capsys, *flags, "--acceptance", "0.9", "0.8")["num_draft_tokens"] == calibrated
    assert run(capsys, *flags, "--acceptance", "0")["num_draft_tokens"] == 0
    assert main([*FLAGS, *flags]) == 0
    said = capsys.readouterr()
    assert "found for 50% of the tokens, accepted by position 90%, 80%: with 0.1 less" in said.err
    assert "Drafts verified, accepted:" in said.out


def test_an_acceptance_above_one_is_refused(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--calibration", str(calibration), "--acceptance", "1.5"]) == 2
    assert "--acceptance is 1.5; it must be from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ["configs/models/Qwen3-8B", "--device", "H200", "--acceptance", "0.7"],
            "--acceptance is for a --calibration of a server whose steps have drafts",
        ),
        ([], "give either --calibration"),
        (["configs/models/Qwen3-8B"], "give the --device on which the model would run"),
        (["configs/models/Qwen3-8B", "--device", "TPU", "--memory-gb", "9"], "has no peaks of"),
        (["configs/models/Qwen3-8B", "--device", "H200", "--memory-gb", "12"], "leaves no room"),
        (["configs/models/Qwen3-8B", "--device", "H200", "-tp", "0"], "must be at least 1"),
        (["configs/models/Qwen3-8B", "--device", "H200", "-tp", "3"], "use 1 or 2 or 4 or 8"),
        (["configs/models/Qwen3.5-9B", "--device", "H200", "-tp", "3"], "use 1 or 2 or 4 or 8"),
        (
            ["configs/models/Qwen3-8B", "--device", "GH200", "--memory-gb", "96", "-tp", "2"],
            "no link between two --device GH200",
        ),
        (["--prompt-format", "text", "--calibration", "x"], "--prompt-format text says nothing"),
        (["--replicas", "0", "--calibration", "x"], "--replicas is 0"),
        (["--calibration", "/nowhere"], "--calibration /nowhere cannot be read"),
    ],
)
def test_wrong_flags_are_one_sentence(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert why in capsys.readouterr().err


def test_a_model_on_a_device_is_simulated_from_its_datasheet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["configs/models/Llama-3.1-8B", "--device", "H200", "--num-prompts", "8", "--json"]
    lengths = ["--random-input-len", "512", "--random-output-len", "8", "--max-concurrency", "1"]
    assert main([*flags, *lengths]) == 0
    made = json.loads(capsys.readouterr().out)
    # tests/bench/gpu/ESTIMATE.md expects 3.79 ms at batch 1.
    assert made["median_tpot_ms"] == pytest.approx(3.79, rel=0.1)
    assert made["device"] == "H200" and made["model_id"] == "Llama-3.1-8B"


def test_ranks_are_faster_by_less_than_there_are_more_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["configs/models/Llama-3.1-8B", "--device", "H100", "--num-prompts", "4"]
    flags += ["--random-input-len", "64", "--random-output-len", "8", "--max-concurrency", "1"]
    made = [run(capsys, *flags, "--tensor-parallel-size", str(size)) for size in (1, 2)]
    assert [each["tensor_parallel_size"] for each in made] == [1, 2]
    one, two = (each["median_tpot_ms"] for each in made)
    assert one / 2 < two < one
    low, high = made[1]["error_bars"]["median_tpot_ms"]
    assert low < 0.75 * two and high > 1.25 * two

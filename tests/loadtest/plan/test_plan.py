"""`penstock plan`: the choice, the costs and the front, and the command from flags to files."""

import contextlib
import csv
import io
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.loadtest.bench.config import bench_config
from penstock.loadtest.bench.flags import make_parser as make_bench_parser
from penstock.loadtest.bench.forecast import Forecast, ForecastFigure
from penstock.loadtest.calibrate.calibration import Calibration, FrontEnd
from penstock.loadtest.plan.candidates import Candidate, make_candidates
from penstock.loadtest.plan.choice import choose, cost_of, front, sized
from penstock.loadtest.plan.cli import main, make_parser
from penstock.loadtest.plan.probe import Point, Targets, probe
from penstock.loadtest.plan.refutation import serve_command
from penstock.loadtest.plan.search import Load, Searched
from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.model import ClassError
from tests.loadtest.plan.test_search import candidate_of, one_at_a_time
from tests.loadtest.simulate.test_same_decisions import make_info
from tests.support.made_up_steps import known_model
from tests.support.paths import ROOT
from tests.support.serving import wait_until

LLAMA = str(ROOT / "configs" / "models" / "Llama-3.1-8B")


def point(rate: float, device: float, user: float, *, is_met: bool = True) -> Point:
    return Point(
        rate=rate, num_replicas=1, num_devices=1, is_met=is_met, num_requests=1, num_steps=1,
        cpu_s=0.0, input_tokens_per_s=4 * device, output_tokens_per_s=device,
        user_tokens_per_s=user, input_share=0.25,
    )  # fmt: skip


def searched(
    limit: float | None, *points: Point, price: float | None = 2.0, rounds: bool = False
) -> Searched:
    made = replace(
        candidate_of(one_at_a_time()), price=price, quantization="int8" if rounds else None
    )
    return Searched(candidate=made, points=list(points), limit=limit)


def test_the_cheapest_candidate_that_carries_the_load_is_first() -> None:
    small, large = searched(3.0, price=2.0), searched(11.0, price=7.0)
    best, other = sized([large, small], 10.0)
    assert (best.searched, best.num_devices, best.price) == (large, 1, 7.0)
    assert (other.num_devices, other.price) == (4, 8.0)
    assert sized([large, small], 6.0)[0].searched is small
    assert sized([searched(None)], 1.0) == []


def on_ranks(limit: float, num_ranks: int, *points: Point) -> Searched:
    server = one_at_a_time()
    info = replace(server.info, tensor_parallel_size=num_ranks)
    made = replace(candidate_of(server._replace(info=info)), price=2.0)
    return Searched(candidate=made, points=list(points), limit=limit)


def test_all_devices_of_a_replica_are_paid_for() -> None:
    one, four = on_ranks(3.0, 1), on_ranks(11.0, 4)
    best, other = sized([four, one], 10.0)
    assert (best.searched, best.num_devices, best.price) == (one, 4, 8.0)
    assert (other.num_replicas, other.num_devices, other.price) == (1, 4, 8.0)
    assert sized([four, one], 9.0)[0].num_devices == 3
    assert sized([four, one], None)[0].searched is one


def test_the_ranks_of_a_processor_are_one_device() -> None:
    server = one_at_a_time()
    info = replace(server.info, tensor_parallel_size=2, computed_by="2 threads")
    made = replace(candidate_of(server._replace(info=info)), price=2.0)
    assert (made.num_devices, made.replica_price) == (1, 2.0)


def test_the_front_counts_the_tokens_of_each_device() -> None:
    four = replace(point(1.0, 120.0, 40.0), num_devices=4)
    assert four.device_tokens_per_s == 30.0
    alone = point(1.0, 50.0, 20.0)
    made = front([on_ranks(1.0, 4, four), on_ranks(1.0, 1, alone)])
    assert [each for _, each in made] == [alone, four]


def test_weights_are_rounded_only_where_that_saves_a_device() -> None:
    plain, rounded = searched(10.0), searched(15.0, rounds=True)
    assert sized([rounded, plain], 9.0)[0].searched is plain
    assert sized([rounded, plain], 14.0)[0].searched is rounded


def test_a_load_that_the_limit_just_carries_takes_no_device_more() -> None:
    assert sized([searched(0.1)], 0.3)[0].num_devices == 3


def test_the_costs_of_input_and_output_add_up_to_the_price() -> None:
    made = point(1.0, 50.0, 20.0)
    cost = cost_of(7.2, made)
    assert cost is not None and made.input_tokens_per_s and made.output_tokens_per_s
    an_hour = (
        3600 / 1e6 * (cost.input * made.input_tokens_per_s + cost.output * made.output_tokens_per_s)
    )
    assert an_hour == pytest.approx(7.2)
    assert cost.output == pytest.approx(0.75 * 7.2 / (3600 * 50) * 1e6)
    assert cost_of(None, made) is None


def test_the_front_has_what_no_other_point_beats_in_both() -> None:
    slow, middle, fast = point(3, 90, 10), point(2, 60, 30), point(1, 20, 50)
    beaten, missed = point(2, 50, 25), point(9, 99, 99, is_met=False)
    made = front([searched(3.0, fast, beaten, slow), searched(2.0, missed, middle)])
    assert [each for _, each in made] == [slow, middle, fast]


def known_server() -> SimulatedServer:
    """Whose coefficients are known, with an error of 5 %."""
    errors = {kind: ClassError(num_steps=100, mape=0.08, bias=0.05) for kind in StepClass}
    model = replace(known_model(runs_ahead=False), errors=errors)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    return SimulatedServer(make_info(200, runs_ahead=False), model, config)


def test_input_takes_the_share_of_the_time_that_prompts_are_computed() -> None:
    """Known coefficients, so that a load of prompts alone and one of answers alone are clear."""
    candidate, targets = candidate_of(known_server()), Targets({"ttft": 1e6})
    shares = {}
    for name, input_len, output_len in (("prompts", 60, 1), ("answers", 2, 90)):
        config = WorkloadConfig(seed=1, input_len=input_len, output_len=output_len)
        shares[name] = probe(candidate, Load(config, 2.0).at(30.0), 30.0, targets).input_share
    assert shares["prompts"] is not None and shares["answers"] is not None
    assert shares["prompts"] > 0.1 > shares["answers"]


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    return write_calibration(tmp_path)


def write_calibration(directory: Path) -> Path:
    server = known_server()
    path = directory / "calibration.json"
    Calibration(
        name="tiny", source="made-up steps", date="20260101-000000", version="0",
        model=server.info, scheduler=server.scheduler, step_model=server.step_model,
        front_end=FrontEnd(request_s=0.001),
    ).write(path)  # fmt: skip
    return path


LENGTHS = ["--random-input-len", "20", "--random-output-len", "10", "--random-range-ratio", "0.5"]
FLAGS = [*LENGTHS, "--seed", "7", "--seconds", "1", "--check-seconds", "1", "--jobs", "1"]
FLAGS += ["--goodput", "ttft:60", "tpot:20", "--precision", "0.2"]


def test_a_plan_is_a_table_json_csv_and_a_page(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("plan.json", "plan.csv", "plan.html")}
    flags = ["--calibration", str(calibration), "--price-per-gpu-hour", "3", "--max-num-seqs", "2",
             "8", "--request-rate", "400", "--output", str(files["plan.json"]), "--csv",
             str(files["plan.csv"]), "--report", str(files["plan.html"])]  # fmt: skip
    assert main([*FLAGS, *flags]) == 0
    shown = capsys.readouterr()
    for words in ("Cost per million output tokens:", "Candidates, the best first",
                  "Throughput against speed", "what would refute it",
                  "penstock bench --num-prompts"):  # fmt: skip
        assert words in shown.out
    assert "2 of 2: " in shown.err and "us a step" in shown.err
    made = json.loads(files["plan.json"].read_text())
    plan = made["plan"]
    assert (plan["tensor_parallel_size"], plan["pipeline_parallel_size"]) == (1, 1)
    assert plan["is_confirmed"] and plan["price_per_hour"] == 3 * plan["num_devices"]
    assert plan["num_replicas"] * plan["max_request_rate_per_replica"] >= 400 * 0.9
    assert plan["max_num_seqs"] == 8  # two at a time carry less
    assert 0 < plan["figures"]["goodput"] <= 1.2 * 400
    rows = list(csv.DictReader(files["plan.csv"].read_text().splitlines()))
    assert len(rows) >= len(made["front"]) > 1
    assert {row["max_num_seqs"] for row in rows} == {"2", "8"}
    page = files["plan.html"].read_text()
    assert "Pareto front" in page and "tiny: plan of" in page


class Planned(NamedTuple):
    """shown: what stands on stdout. made: what `output` has."""

    calibration: Path
    output: Path
    shown: str
    made: dict[str, Any]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """What a plan with FLAGS alone is."""
    directory = tmp_path_factory.mktemp("planned")
    calibration, output = write_calibration(directory), directory / "plan.json"
    flags = ["--calibration", str(calibration), "--output", str(output)]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main([*FLAGS, *flags]) == 0
    return Planned(calibration, output, shown.getvalue(), json.loads(output.read_text()))


def test_the_command_that_a_plan_ends_with_is_of_the_load_that_it_expects(
    planned: Planned,
) -> None:
    made = planned.made
    words = shlex.split(made["bench"])
    assert words[:2] == ["penstock", "bench"] and words[-2:] == ["--check", str(planned.output)]
    # Raises where the load is another.
    config = bench_config(make_bench_parser().parse_args(words[2:]), None)
    assert config.forecast is not None
    for each in config.forecast.figures:
        assert each.low < each.value < each.high
    assert made["serve"] == "penstock serve tiny --max-num-seqs 8 --max-num-batched-tokens 64"


def test_what_a_plan_expects_is_what_a_simulation_of_its_command_finds(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.loadtest.simulate.cli import main as simulate

    made = planned.made
    words = shlex.split(made["bench"])[2:-2]
    capsys.readouterr()
    flags = ["--calibration", str(planned.calibration), "--metric-percentiles", "50,99", "--json"]
    assert simulate([*words, *flags, "--disable-tqdm"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    for each in made["forecast"]["figures"]:
        assert each["low"] <= result[each["key"]] <= each["high"]


def test_the_verdict_and_the_refutation_are_of_one_forecast(planned: Planned) -> None:
    shown, made = planned.shown, planned.made
    by_key = {each["key"]: each for each in made["forecast"]["figures"]}
    for name in ("TTFT", "TPOT"):
        values = [by_key[f"{p}_{name.lower()}_ms"]["value"] for p in ("p50", "p99")]
        assert f"Forecast {name} p50, p99 (ms):        {values[0]:,.2f}, {values[1]:,.2f}" in shown
        assert values[1] <= made["targets_p99_ms"][name.lower()]
    assert not any(key.endswith("_ms") for key in made["plan"]["figures"])
    assert made["plan"]["is_confirmed"] and made["plan"]["is_testable"]
    assert "Meets the targets:                  yes" in shown


def test_a_calibration_too_poor_to_test_anything_says_so_first_and_has_a_status_of_its_own(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Calibration.read(calibration)
    errors = {kind: replace(error, bias=0.8) for kind, error in read.step_model.errors.items()}
    replace(read, step_model=replace(read.step_model, errors=errors)).write(calibration)
    output = tmp_path / "plan.json"
    flags = [*FLAGS, "--calibration", str(calibration), "--output", str(output)]
    assert main(flags) == 3
    title, first, *_ = capsys.readouterr().out.splitlines()
    assert " Plan " in title and first.startswith(
        "No measurement could refute this plan: TTFT p99 "
    )
    plan = json.loads(output.read_text())["plan"]
    assert plan["is_confirmed"] and not plan["is_testable"]


def forecasts_of(p99_ms: Callable[[float], float]) -> Callable[..., Forecast]:
    """Forecasts a TTFT that follows from the rate."""

    def forecast_at(candidate: Candidate, rate: float) -> Forecast:
        ttft = ForecastFigure(
            figure="TTFT p99, ms", key="p99_ttft_ms", value=p99_ms(rate), low=0.0, high=1e3
        )
        return Forecast(load={}, targets_ms={"ttft": 100.0}, figures=[ttft])

    return forecast_at


def test_a_rate_whose_forecast_misses_the_targets_is_not_planned() -> None:
    config = WorkloadConfig(seed=1, input_len=20, output_len=5)
    load, targets = Load(config, 1.0), Targets({"ttft": 1e6})
    (best,) = sized([replace(searched(10.0), candidate=candidate_of(known_server()))], None)
    lower = choose(best, load, targets, None, forecasts_of(lambda rate: 10.2 * rate))
    assert lower.meets_targets and lower.point.rate == lower.sized.limit == pytest.approx(9.5)
    more = choose(best, load, targets, 10.0, forecasts_of(lambda rate: 15.0 * rate))
    assert more.meets_targets and (more.sized.num_replicas, more.point.rate) == (2, 10.0)
    none = choose(best, load, targets, None, forecasts_of(lambda rate: 1e3))
    assert none.point.is_met and not none.meets_targets


def test_a_target_of_the_whole_latency_has_a_forecast_too(
    calibration: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    flags = [*FLAGS, "--calibration", str(calibration), "--output", str(output)]
    assert main([*flags, "--goodput", "e2el:300"]) == 0
    made = json.loads(output.read_text())
    (e2el,) = (each for each in made["forecast"]["figures"] if each["key"] == "p99_e2el_ms")
    assert e2el["low"] < e2el["value"] <= 300


def test_a_plan_says_what_it_assumes_of_drafts_and_what_their_error_changes(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Calibration.read(calibration)
    replace(read, model=replace(read.model, takes_drafts=True)).write(calibration)
    output = tmp_path / "plan.json"
    flags = [*FLAGS, "--calibration", str(calibration), "--output", str(output)]
    limits = {}
    for acceptance in ("0", "0.8"):
        assert main([*flags, "--acceptance", acceptance]) == 0
        limits[acceptance] = json.loads(output.read_text())["plan"]["max_request_rate_per_replica"]
    assert limits["0.8"] > limits["0"]
    said = capsys.readouterr()
    assert "Drafts, assumed:" in said.out and "accepted by position 80%" in said.out
    (note,) = (each for each in json.loads(output.read_text())["notes"] if "drafts are" in each)
    assert "with 0.1 less, that, and 0.1 more, TPOT p50 is " in note


def test_targets_that_no_rate_meets_are_no_plan(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    flags = [*FLAGS, "--calibration", str(calibration), "--output", str(output)]
    assert main([*flags, "--goodput", "tpot:0.001"]) == 1
    assert "no candidate meets the targets at any rate" in capsys.readouterr().out
    assert json.loads(output.read_text())["plan"] is None


def test_a_trace_is_planned_for_at_its_own_arrivals(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "recording.json"
    num = 400
    lengths = {"input_lens": [20] * num, "output_lens": [5] * num}
    # Bursts of ten.
    starts = [0.5 * (index // 10) for index in range(num)]
    recording.write_text(json.dumps(lengths | {"start_times": starts}))
    output = tmp_path / "plan.json"
    flags = ["--calibration", str(calibration), "--dataset-name", "recording", "--dataset-path",
             str(recording), "--output", str(output)]  # fmt: skip
    assert main([*FLAGS[len(LENGTHS) :], *flags]) == 0
    made = json.loads(output.read_text())
    assert made["request_rate"] == pytest.approx(20.5, rel=0.01)
    assert "--trace-speedup" in made["bench"] and "--request-rate" not in made["bench"]


@pytest.mark.slow
def test_rounded_weights_are_an_answer_and_what_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [LLAMA, "--device", "H200", "--memory-gb", "20", "--max-model-len", "2048", "--seconds",
             "3", "--check-seconds", "3", "--seed", "1", "--goodput", "ttft:3000", "tpot:100",
             "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--precision", "0.5",
             "--random-input-len", "64", "--random-output-len", "8", "--jobs", "1",
             "--output", str(tmp_path / "plan.json")]  # fmt: skip
    assert main(flags) == 0
    shown = capsys.readouterr()
    assert "none weights" in shown.err and "leaves no room" in shown.err
    assert "int8 weights change the answers" in shown.err
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["plan"]["quantization"] == "int8"
    assert "--load-format dummy" in made["serve"] and "--quantization int8" in made["serve"]


@pytest.fixture
def llama_70b(tmp_path: Path) -> str:
    """A directory with its config.json."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    shape |= {"num_attention_heads": 64}
    config = json.loads((Path(LLAMA) / "config.json").read_text())
    directory = tmp_path / "Llama-3.1-70B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | shape))
    return str(directory)


@pytest.mark.parametrize(
    ("device", "weights", "sizes"),
    [
        ("H100", "none", {4, 8}),
        ("H200", "none", {2, 4}),
        ("H200", "int8", {1}),
        ("H100", "int8", {2, 4}),
    ],
)
def test_a_model_that_does_not_fit_one_device_is_planned_on_the_fewest_and_twice_as_many(
    llama_70b: str, device: str, weights: str, sizes: set[int]
) -> None:
    flags = [llama_70b, "--device", device, "--quantization", weights, "--goodput", "tpot:50",
             "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]  # fmt: skip
    made = make_candidates(make_parser().parse_args(flags))
    assert {each.ranks for each in made.all} == {(size, 1) for size in sizes}
    left_out = [each for each in made.left_out if each.startswith(f"{device}, TP 1, ")]
    assert bool(left_out) == (1 not in sizes)
    assert all(f"use --tensor-parallel-size {min(sizes)}" in each for each in left_out)


def test_a_plan_of_70b_on_h100s_has_as_many_as_it_needs_and_pays_for_all(
    llama_70b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, rows = tmp_path / "plan.json", tmp_path / "plan.csv"
    flags = [llama_70b, "--device", "H100", "--price-per-gpu-hour", "2.5", "--max-model-len",
             "2048", "--tensor-parallel-size", "2", "4", "8", "--quantization", "none", "int8",
             "--goodput", "tpot:50", "--seconds", "1", "--check-seconds", "1", "--seed", "1",
             "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--precision", "0.9",
             "--random-input-len", "16", "--random-output-len", "4", "--jobs", "1",
             "--output", str(output), "--csv", str(rows)]  # fmt: skip
    assert main(flags) == 0
    shown, made = capsys.readouterr(), json.loads(output.read_text())
    plan = made["plan"]
    size = plan["tensor_parallel_size"]
    assert (size, plan["pipeline_parallel_size"], plan["quantization"]) == (2, 1, "int8")
    assert plan["num_devices"] == size * plan["num_replicas"] == plan["figures"]["num_devices"]
    assert plan["price_per_hour"] == 2.5 * plan["num_devices"]
    assert f"{size} x H100 (TP {size} x PP 1 x 1 replica)" in shown.out
    assert f"--tensor-parallel-size {size}" in made["serve"]
    notes = "\n".join(made["notes"])
    for words in ("use --tensor-parallel-size 4", "PP stays at 1", "the error bars assume 35 %"):
        assert words in notes and words in shown.err
    assert plan["step_time_bias"] == 0.35 and "35%" in shown.out
    made_rows = list(csv.DictReader(rows.read_text().splitlines()))
    of_weights = {
        weights: {
            row["tensor_parallel_size"] for row in made_rows if row["quantization"] == weights
        }
        for weights in ("", "int8")
    }
    assert of_weights == {"": {"4", "8"}, "int8": {"2", "4", "8"}}


@pytest.mark.parametrize("flags", [[], ["--tensor-parallel-size", "2"]])
def test_a_calibration_of_two_gpus_is_planned_for_on_two(
    calibration: Path, flags: list[str]
) -> None:
    read = Calibration.read(calibration)
    replace(read, model=replace(read.model, tensor_parallel_size=2)).write(calibration)
    typed = ["--calibration", str(calibration), "--goodput", "tpot:20", *flags]
    args = make_parser().parse_args(typed)
    (made,) = make_candidates(args).all
    assert (made.ranks, made.num_devices) == ((2, 1), 2)
    assert "--tensor-parallel-size 2" in serve_command(made, args, "tiny")


def test_a_calibration_says_nothing_of_other_ranks(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, "--calibration", str(calibration), "--tensor-parallel-size", "2"]
    assert main(flags) == 2
    assert "--calibration was measured with 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "give either --calibration"),
        ([LLAMA], "give the --device on which the model would run"),
        ([LLAMA, "--device", "H200", "H100"], "give --price-per-gpu-hour, one for each"),
        ([LLAMA, "--device", "H200", "--price-per-gpu-hour", "0"], "must have 1 positive number,"),
        ([LLAMA, "--device", "H200", "--memory-gb", "4"], "which leaves no room"),
        (["--calibration", "x", "--device", "H200"], "--device is that of --calibration"),
        (["--calibration", "/nowhere"], "--calibration /nowhere cannot be read"),
        (["--calibration", "x", "--seconds", "0"], "--seconds is 0"),
        (["--calibration", "x", "--precision", "2"], "--precision is 2"),
        (["--calibration", "x", "--jobs", "0"], "--jobs is 0"),
        (["--calibration", "x", "--prompt-format", "text"], "--prompt-format text says nothing"),
    ],
)
def test_wrong_flags_are_one_sentence(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--goodput", "ttft:100"]) == 2
    assert why in capsys.readouterr().err


def test_targets_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--calibration", "x"]) == 2
    assert "--goodput" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "plan", "configs/models/Llama-3.1-8B"]
    command += ["--device", "H200", "--goodput", "ttft:2000", "tpot:50", "--jobs", "2"]
    with (tmp_path / "errors").open("w") as errors:
        plan = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
    children = Path(f"/proc/{plan.pid}/task/{plan.pid}/children")
    try:
        wait_until(lambda: len(children.read_text().split()) >= 3)
        pids = children.read_text().split()
        time.sleep(1.0)  # so that some of them have begun to search
    finally:
        plan.kill()
        plan.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

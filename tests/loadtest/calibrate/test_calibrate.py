"""`penstock calibrate`: a sweep, a running server, and the file that it writes."""

from pathlib import Path

import pytest

from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.loadtest.calibrate.calibration import Calibration
from penstock.loadtest.calibrate.cli import main
from penstock.loadtest.calibrate.sweep import run_sweep
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.fit import fit
from tests.support.serving import running_server


def test_a_sweep_sees_steps_of_every_class_and_any_number_of_sequences() -> None:
    executor = ScriptedExecutor(scripted_info(num_blocks=4096, max_model_len=600))
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256)
    visited: list[tuple[int, int]] = []
    samples = run_sweep(
        executor,
        config,
        seconds=1.5,
        on_level=lambda number, total: visited.append((number, total)),
    )
    assert visited == [(number, 15) for number in range(15)]
    assert {sample.kind for sample in samples} == set(StepClass)
    decodes = {s.amounts.sequences for s in samples if s.kind is StepClass.DECODE}
    assert {1, 2, 4, 8, 16} <= decodes
    assert max(sample.amounts.tokens for sample in samples) == 256
    assert all(sample.device_s is not None and sample.device_s > 0 for sample in samples)
    assert fit(samples, runs_ahead=False).errors.keys() == set(StepClass)


def test_a_server_that_had_load_is_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.json"
    flags = ("--num-threads", "1", "--max-num-seqs", "24")
    with running_server(*flags) as server:
        command = ["--base-url", server.url, "--output", str(path)]
        for index in range(8):
            server.complete(prompt=[3 + index] * 40, max_tokens=30, ignore_eos=True)
        steps = server.get("/steps").json()
        assert (
            "decode" in steps["prediction_error"]
        )  # prompts are steps after a pause, of no known length
        assert main(command) == 0
    made = Calibration.read(path)
    shown = capsys.readouterr().out
    assert made.name == "penstock-demo" and made.model.device == "cpu"
    assert made.scheduler.max_num_seqs == 24
    front_end = made.front_end
    assert "front end, a request: " in shown and "front end, a token: " in shown
    # A request is parsed and answered, so it costs more than a token.
    assert 0.0 < front_end.request_s < 1.0 and front_end.token_s < front_end.request_s
    assert front_end.report_s + front_end.token_s > 0.0
    decode = made.step_model.errors[StepClass.DECODE]
    assert decode.num_steps >= 48 and f"{decode.mape:.1%}" in shown
    made.write(tmp_path / "again.json")
    assert Calibration.read(tmp_path / "again.json") == made


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "is not a file of penstock calibrate: Object missing required field"),
        ("not JSON", "is not a file of penstock calibrate"),
    ],
)
def test_another_file_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidConfig, match=why):
        Calibration.read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["demo", "--base-url", "http://x"], "give either MODEL or --base-url"),
        (["--output", "/"], "is a directory"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--secondz", "1"], "unknown flag --secondz; did you mean --seconds?"),
        (["--seconds", "0"], "--seconds is 0; it must be more than 0"),
    ],
)
def test_wrong_flags_are_one_sentence(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert why in capsys.readouterr().err

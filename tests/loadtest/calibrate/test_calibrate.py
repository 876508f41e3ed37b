"""`penstock calibrate`: a sweep, a running server, and the file that it writes."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.loadtest.calibrate.calibration import Calibration
from penstock.loadtest.calibrate.cli import describe, main
from penstock.loadtest.calibrate.drafts import DraftsAssumed, drafts_of
from penstock.loadtest.calibrate.sweep import run_sweep
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.fit import fit
from penstock.scheduler.step_model.model import ClassError, Range
from tests.support.made_up_steps import known_model
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
        status = main(command)
    made = Calibration.read(path)
    assert status == (3 if made.is_poor else 0)  # beside other programs these few steps may be
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


def test_prompts_that_the_server_had_seen_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server("--num-threads", "1") as server:
        for _ in range(8):
            server.complete(prompt=[7] * 100, max_tokens=20, ignore_eos=True)
        main(["--base-url", server.url, "--output", str(tmp_path / "server.json")])
    assert "of the prompt tokens since the server's start were in its" in capsys.readouterr().err


def calibration_with(biases: dict[StepClass, tuple[int, float]]) -> Calibration:
    """biases: how many steps of a class, and their bias."""
    info = scripted_info(num_blocks=64, max_model_len=600)
    errors = {
        kind: ClassError(num_steps=num, mape=bias, bias=bias)
        for kind, (num, bias) in biases.items()
    }
    covered = {kind: {"tokens": Range(1, 9)} for kind in biases}
    model = replace(known_model(runs_ahead=False), errors=errors, covered=covered)
    return Calibration(
        name="tiny", source="made-up steps", date="20260101-000000", version="0", model=info,
        scheduler=SchedulerConfig(), step_model=model,
    )  # fmt: skip


def test_a_calibration_whose_steps_are_mostly_unpredictable_says_so_first() -> None:
    poor = calibration_with({StepClass.DECODE: (60, 0.7), StepClass.MIXED: (50, 0.1)})
    assert poor.is_poor and describe(poor).startswith("This calibration tests nothing: ")


def test_a_few_unpredictable_steps_do_not_make_a_calibration_poor() -> None:
    good = calibration_with({StepClass.DECODE: (60, 0.59), StepClass.PREFILL: (50, 0.9)})
    assert not good.is_poor and describe(good).startswith("tiny, ")


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


def _metrics(*, drafts: int, generated: int, accepted: list[int], reached: list[int]) -> str:
    lines = [
        f"penstock_generated_tokens_total {generated}.0",
        f'penstock_spec_decode_drafts_total{{source="ngram"}} {drafts - 40}.0',
        'penstock_spec_decode_drafts_total{source="suffix"} 40.0',
        f'penstock_spec_decode_accepted_tokens_total{{source="ngram"}} {sum(accepted)}.0',
    ]
    for name, counts in (("accepted", accepted), ("reached", reached)):
        lines += [
            f'penstock_spec_decode_{name}_tokens_per_pos_total{{position="{position}",'
            f'source="ngram"}} {float(count)}'
            for position, count in enumerate(counts)
        ]
    return "\n".join(lines)


def test_the_acceptance_of_a_servers_drafts_is_read_from_its_metrics() -> None:
    before = _metrics(drafts=100, generated=150, accepted=[50, 20, 2], reached=[100, 50, 20])
    assert drafts_of(before) == DraftsAssumed((0.5, 0.4), 1.0)
    after = _metrics(drafts=200, generated=1000, accepted=[140, 65, 2], reached=[200, 100, 20])
    assert drafts_of(after, before) == DraftsAssumed((0.9, 0.9), 100 / 715)
    assert drafts_of("penstock_generated_tokens_total 9.0") is None
    assert str(DraftsAssumed((0.9, 0.5), 0.2).changed_by(0.2)) == (
        "found for 20% of the tokens, accepted by position 100%, 70%"
    )

"""`penstock bench compare`, from results of penstock and of vLLM to text and a page."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.bench.cli import main
from tests.support.stub_server import answer_five, stub

# As vLLM writes it: json.dump, with its own keys and no others.
VLLM: dict[str, Any] = {
    "date": "20261122-101112",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "label": None,
    "model_id": "stub",
    "tokenizer_id": "stub",
    "num_prompts": 8,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 1.0,
    "completed": 8,
    "failed": 0,
    "total_input_tokens": 40,
    "total_output_tokens": 40,
    "request_throughput": 8.0,
    "request_goodput:": None,
    "output_throughput": 40.0,
    "total_token_throughput": 80.0,
    "max_output_tokens_per_s": 40.0,
    "max_concurrent_requests": 8,
    "mean_ttft_ms": 1e9,
    "median_ttft_ms": 1e9,
    "std_ttft_ms": 0.0,
    "p99_ttft_ms": 1e9,
    "mean_tpot_ms": math.nan,
}


def measured(path: Path, *flags: str) -> Path:
    """A result of our own."""
    few = ["--num-prompts", "8", "--random-input-len", "4", "--random-output-len", "5"]
    save = ["--append-result", "--result-dir", str(path.parent), "--result-filename", path.name]
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *few, *save, *flags]) == 0
    return path


def written(path: Path, *results: dict[str, Any], separator: str = "\n") -> str:
    path.write_text(separator.join(map(json.dumps, results)))
    return str(path)


def test_our_result_and_vllms_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = written(tmp_path / "vllm.json", VLLM)
    ours = measured(tmp_path / "ours.json")
    capsys.readouterr()
    page = tmp_path / "out" / "compared.html"
    assert main(["compare", theirs, str(ours), "--html", str(page)]) == 0
    printed = capsys.readouterr()
    (mean,) = [line for line in printed.out.splitlines() if line.startswith("Mean TTFT, ms")]
    saved = json.loads(ours.read_text())
    assert f"{saved['mean_ttft_ms']:,.2f}" in mean and mean.endswith("  B")
    assert "Mean TPOT" not in printed.out  # vLLM's is not a number
    assert "differ" not in printed.err and "one run each" in printed.err
    assert f"{saved['mean_ttft_ms']:,.2f}" in page.read_text()


def test_repeated_runs_are_lines_of_a_file_or_files_with_commas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [VLLM | {"output_throughput": value} for value in (40.0, 50.0, 60.0)]
    lines = written(tmp_path / "lines.json", *runs)
    files = ",".join(written(tmp_path / f"{n}.json", run) for n, run in enumerate(runs))
    assert main(["compare", lines, files]) == 0
    printed = capsys.readouterr().out
    assert printed.count("median of 3 runs") == 2
    (row,) = [line for line in printed.splitlines() if line.startswith("Output tokens/s")]
    assert row.split()[2:] == [*["50.00", "(40.00-60.00)"] * 2, "1.000", "same"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "b.json cannot be read: No such file"),
        ("", "b.json is empty"),
        ("[1]", "b.json is not a result of penstock bench"),
        ('{"completed": 1}\n{"completed": ', "b.json, line 2: it is not JSON"),
        ('{"completed": 1}\n\n{"done": 1}', "b.json, line 3 is not a result"),
    ],
)
def test_a_file_that_is_no_result_is_one_sentence(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = written(tmp_path / "a.json", VLLM), tmp_path / "b.json"
    if text is not None:
        second.write_text(text)
    assert main(["compare", first, str(second)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_single_result_has_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", written(tmp_path / "a.json", VLLM)]) == 2
    assert "give 2 to 5 results to compare" in capsys.readouterr().err
    assert main(["compare"]) == 2
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])

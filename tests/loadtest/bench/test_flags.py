"""The flags of `vllm bench serve` do what they say, or are refused by name."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.loadtest.bench.cli import main
from penstock.loadtest.report.report import RequestResult
from penstock.loadtest.workload.token_counter import tokenizer_counter
from tests.support.paths import ROOT
from tests.support.sharegpt import ANSWER, QUESTION, sharegpt
from tests.support.stub_server import Exchange, answer_five, stub, token

DEMO = ROOT / "engine" / "hub" / "demo_model"
FEW = ["--num-prompts", "4", "--random-input-len", "4", "--random-output-len", "5"]


def test_flags_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    flags = ["--header", "X-Team=a=b", "Authorization=Basic abc", "--request-id-prefix", "run7-"]
    flags += ["--top-p", "0.5", "--top-k", "7", "--min-p", "0.1", "--repetition-penalty", "1.1"]
    flags += ["--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--logprobs", "2"]
    flags += ["--extra-body", '{"top_k": 9, "user": "me"}', "--served-model-name", "served"]
    flags += ["--input-len", "6", "--output-len", "3", "--num-warmups", "0", "--disable-tqdm"]
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *FEW, *flags]) == 0
    bodies = [exchange.body for exchange in server.exchanges]
    assert {len(body["prompt"]) for body in bodies} == {6}
    expected = {"top_p": 0.5, "top_k": 9, "min_p": 0.1, "repetition_penalty": 1.1, "user": "me"}
    expected |= {"presence_penalty": 0.2, "frequency_penalty": 0.3, "logprobs": 2}
    expected |= {"max_tokens": 3, "model": "served", "ignore_eos": True}
    assert all(body.items() >= expected.items() for body in bodies)
    heads = [head.decode().lower() for head in server.heads]
    assert all("x-team: a=b\r\n" in head for head in heads)
    assert all(head.count("authorization:") == 1 for head in heads)
    assert all("authorization: basic abc\r\n" in head for head in heads)
    assert sorted(head.partition("x-request-id: ")[2].split("\r")[0] for head in heads) == [
        f"run7-{number}" for number in range(4)
    ]


@pytest.mark.slow
def test_eos_is_ignored_for_synthetic_prompts(tmp_path: Path) -> None:
    path = sharegpt(tmp_path / "s.json")
    conversations = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    ignored = []
    for flags in ([], ["--no-ignore-eos"], conversations, [*conversations, "--ignore-eos"]):
        with stub(answer_five) as server:
            assert main(["--base-url", server.url, *FEW, *flags]) == 0
        ignored.append(server.exchanges[-1].body.get("ignore_eos", False))
    assert ignored == [True, False, False, True]


def test_a_server_without_ignore_eos_gets_advice(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(exchange: Exchange) -> None:
        body = b'{"detail": "Unexpected fields in the request: ignore_eos"}'
        await exchange.head("422 Unprocessable Entity", f"Content-Length: {len(body)}")
        await exchange.write(body)

    with stub(refuse) as server:
        assert main(["--base-url", server.url, *FEW]) == 1
    assert "ignore_eos; give --no-ignore-eos" in capsys.readouterr().err


def test_a_field_of_ours_is_left_out_where_the_extra_body_has_null() -> None:
    extra = ["--extra-body", '{"stream_options": null, "ignore_eos": null, "top_k": 1}']
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *FEW, *extra]) == 0
    names = server.exchanges[-1].body.keys()
    assert names == {"model", "prompt", "max_tokens", "temperature", "stream", "top_k"}


def test_every_prompt_starts_with_the_random_prefix() -> None:
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *FEW, "--random-prefix-len", "9"]) == 0
    prompts = [exchange.body["prompt"] for exchange in server.exchanges[1:]]
    assert {len(prompt) for prompt in prompts} == {13}
    assert len({tuple(prompt[:9]) for prompt in prompts}) == 1
    assert len({tuple(prompt[9:]) for prompt in prompts}) == 4


@pytest.mark.slow
def test_results_are_appended_with_their_metadata(tmp_path: Path) -> None:
    flags = ["--append-result", "--result-dir", str(tmp_path), "--metadata", "tp=1", "note=a=b"]
    with stub(answer_five) as server:
        url = ["--base-url", server.url, *FEW]
        for _ in range(2):
            assert main([*url, *flags, "--result-filename", "all.jsonl"]) == 0
        assert main([*url, *flags, "--label", "mine", "--max-concurrency", "2"]) == 0
    first, second = map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())
    assert (first["tp"], first["note"]) == ("1", "a=b") == (second["tp"], second["note"])
    (named,) = tmp_path.glob("mine-infqps-concurrency2-stub-*.json")
    assert json.loads(named.read_text())["label"] == "mine"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--lora-modules", "a"],
            "--lora-modules of vllm bench serve is not supported: each adapter",
        ),
        (["--plot-timeline"], "use --report FILE"),
        (["--hf-split=train"], "--hf-split of vllm bench serve is not supported: save the set"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere has no tokenizer.json"),
        (["--tokenizer", __file__], "cannot be read"),
        (["--header", "x"], "--header 'x' is not valid; write NAME=VALUE"),
        (["--header", "a b=c"], "is not an HTTP header"),
        (["--header", "a=c\r\nd: e"], "is not an HTTP header"),
        (["--metadata", "x"], "--metadata 'x' is not valid"),
        (["--save-detailed"], "--save-detailed requires --save-result or --append-result"),
        (["--result-filename", "x"], "--result-filename requires --save-result"),
        (["--save-result", "--append-result"], "cannot be combined"),
        (["--input-len", "0"], "--random-input-len is 0"),
        (["--random-prefix-len", "-1"], "--random-prefix-len is -1"),
        (
            ["--random-prefix-len", "4", "--dataset-name", "shared-prefix"],
            "requires --dataset-name random",
        ),
        (["--base-url", "http://x", "--port", "8001"], "cannot be combined with --host or --port"),
        (["--endpoint", "v1/completions"], "must start with /"),
        (["--report", "."], "is a directory; give a file's name"),
        (["--report", f"{__file__}/r.html"], "test_flags.py is not a directory"),
        (["--random-range-ratio", "{}{"], '"output": 0.5'),
        (["--random-range-ratio", '{"input": 0.1, "output": 1}'], "is 1; it must be in [0, 1)"),
        (["--base-url", "ftp://x"], "write it like http://127.0.0.1:8000"),
        (["--base-url", "http://x:port"], "is not a server's address"),
        (
            ["--sweep", "--goodput", "ttft:1", "--max-concurrency", "2"],
            "cannot be combined with --max-concurr",
        ),
    ],
)
def test_an_unusable_flag_gets_an_error_message(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert sentence in capsys.readouterr().err


def test_a_tokenizer_gives_the_lengths_of_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = tokenizer_counter(DEMO)
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(sharegpt(tmp_path / "s.json"))]
    with stub(answer_five) as server:
        argv = ["--base-url", server.url, *FEW, *flags, "--num-prompts", "50", "--num-warmups", "0"]
        assert main([*argv, "--tokenizer", str(DEMO), "--json"]) == 0
    sent = {exchange.body["prompt"]: exchange.body["max_tokens"] for exchange in server.exchanges}
    expected = {f"{number}. {QUESTION}": count([ANSWER * (number + 1)])[0] for number in range(12)}
    assert sent == expected  # the thirteenth is longer than the limit of vLLM
    summary = json.loads(capsys.readouterr().out)
    assert (summary["token_lengths"], summary["tokenizer_id"]) == ("tokenizer", str(DEMO))


@pytest.mark.parametrize(
    ("is_known", "message"), [(True, "counted "), (False, "cannot be downloaded")]
)
def test_a_tokenizer_may_be_a_hub_id(is_known: bool, message: str, tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its variables when it is imported."""
    if is_known:
        repository = tmp_path / "hub" / "models--own--model"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("a1")
        (repository / "snapshots" / "a1").mkdir(parents=True)
        shutil.copy(DEMO / "tokenizer.json", repository / "snapshots" / "a1" / "tokenizer.json")
    program = (
        "from pathlib import Path\n"
        "from penstock.loadtest.workload.token_counter import tokenizer_counter\n"
        "print('counted', *tokenizer_counter(Path('own/model'))(['Who are you?']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(("num", "is_asked"), [(201, False), (3, True)])  # two texts each
def test_the_server_does_not_count_many_texts(
    num: int, is_asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharegpt(tmp_path / "s.json", num=num)
    argv = [
        "--dataset-name",
        "sharegpt",
        "--dataset-path",
        str(path),
        "--num-prompts",
        "500",
        "--json",
    ]
    with stub(answer_five) as server:  # it has no /tokenize
        assert main(["--base-url", server.url, *argv]) == 0
    assert any(head.startswith(b"POST /tokenize ") for head in server.heads) is is_asked
    captured = capsys.readouterr()
    assert json.loads(captured.out)["token_lengths"] == "estimated"
    assert ("does not count tokens" in captured.err) is is_asked


def test_requests_too_long_for_the_model_are_left_out_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": 0, "input_length": length, "output_length": 10} for length in (50, 90)]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, rows[1], rows[0], rows[0]]))
    trace = ["--dataset-name", "mooncake", "--dataset-path", str(path), "--num-prompts", "2"]
    with stub(answer_five) as server:
        server.max_model_len = 99
        url = ["--base-url", server.url]
        assert main([*url, *trace, "--json"]) == 0
        printed = capsys.readouterr()
        assert main([*url, *FEW, "--random-input-len", "95"]) == 2
    assert "2 requests are left out" in printed.err and "limit of 99 tokens" in printed.err
    summary = json.loads(printed.out)
    assert (summary["completed"], summary["num_too_long"]) == (2, 2)
    assert {len(exchange.body["prompt"]) for exchange in server.exchanges} == {50}
    assert "none of the 4 requests is that short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "advice"),
    [("401 Unauthorized", "OPENAI_API_KEY"), ("404 Not Found", "check --base-url")],
)
def test_a_server_that_lists_no_models_gets_advice(
    status: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub(answer_five) as server:
        server.models_status = status
        assert main(["--base-url", server.url, *FEW]) == 1
    assert f"HTTP {status[:3]}" in (printed := capsys.readouterr().err) and advice in printed


def test_a_file_that_is_not_json_is_reported_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    path.write_text('[\n{"conversations": []},\n{"conversations": oops}\n]')
    assert main(["--dataset-name", "sharegpt", "--dataset-path", str(path)]) == 2
    assert f"{path}, line 3 is not ShareGPT JSON" in capsys.readouterr().err


def test_an_open_loop_is_timed_from_when_a_request_was_due() -> None:
    late = {"scheduled_s": 1.0, "sent_s": 3.0, "ended_s": 4.0, "arrivals_s": [3.5, 4.0]}
    numbers = {"index": 0, "num_prompt_tokens": 1, "num_output_tokens": 2}
    in_a_loop = RequestResult(**late, **numbers, is_open_loop=True)  # type: ignore[arg-type]
    when_free = RequestResult(**late, **numbers)  # type: ignore[arg-type]
    assert (in_a_loop.ttft_s, in_a_loop.latency_s, in_a_loop.tpot_s) == (2.5, 3.0, 0.5)
    assert (when_free.ttft_s, when_free.latency_s, when_free.tpot_s) == (0.5, 1.0, 0.5)


def test_a_client_that_stalls_does_not_make_the_server_look_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def stall(exchange: Exchange) -> None:
        """The server's thread keeps the interpreter lock, so this process's client stalls."""
        if exchange.number == 1:
            end_s = time.perf_counter() + 0.4
            old = sys.getswitchinterval()
            sys.setswitchinterval(1.0)
            while time.perf_counter() < end_s:
                pass
            sys.setswitchinterval(old)
        await exchange.head()
        await exchange.event(token("a", "stop"))
        await exchange.finish(1)

    with stub(stall) as server:
        flags = ["--num-prompts", "20", "--request-rate", "100", "--burstiness", "1000", "--json"]
        assert main(["--base-url", server.url, *FEW, *flags]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["max_send_delay_ms"] > 200
    # Requests that were due during the stall waited for its end, and that time counts.
    assert summary["mean_ttft_ms"] > 50
    assert "latencies count from when it was due" in captured.err


@pytest.mark.slow
def test_two_runs_send_other_prompts_unless_they_have_one_seed() -> None:
    def prompts(*flags: str) -> list[object]:
        with stub(answer_five) as server:
            assert main(["serve", "--base-url", server.url, *FEW, *flags]) == 0
            return [exchange.body["prompt"] for exchange in server.exchanges]

    assert prompts("--seed", "3") == prompts("--seed", "3")
    assert prompts()[-1] != prompts()[-1]


def test_a_wrong_choice_is_answered_with_the_values_as_they_are_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--base-url", "http://127.0.0.1:9", "--dataset-name", "nothing"]) == 2
    error = capsys.readouterr().err
    assert "sharegpt" in error and "Dataset." not in error

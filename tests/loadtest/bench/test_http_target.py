"""The client against a stub on raw sockets, which knows exactly what it sent and when."""

import asyncio
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from penstock.loadtest.bench.cli import main
from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.replay import replay, run
from penstock.loadtest.report.report import Replay, RequestResult
from penstock.loadtest.workload.config import PromptFormat, WorkloadConfig
from penstock.loadtest.workload.workload import make_requests
from tests.support.paths import ROOT
from tests.support.stub_server import (
    Behaviour,
    Exchange,
    Stub,
    answer_five,
    delta,
    sse,
    stub,
    token,
    usage,
)
from tests.support.timing import Disturbance

# An event may be seen this much later than it was sent, where nothing else runs.
TOLERANCE_S = 0.08


def measure(
    server: Stub,
    num_prompts: int = 1,
    *,
    endpoint: str = "/v1/completions",
    rate: float = float("inf"),
    max_concurrency: int | None = None,
    timeout_s: float = 10.0,
) -> Replay:
    is_chat = endpoint.endswith("chat/completions")
    workload = WorkloadConfig(
        num_prompts=num_prompts,
        input_len=4,
        output_len=5,
        request_rate=rate,
        prompt_format=PromptFormat.TEXT if is_chat else PromptFormat.IDS,
    )
    config = TargetConfig(
        base_url=server.url, model="stub", endpoint=endpoint, request_timeout_s=timeout_s
    )

    async def go() -> Replay:
        async with HttpTarget(config) as target:
            return await replay(target, make_requests(workload), max_concurrency=max_concurrency)

    return run(go())


def only(observed: Replay) -> RequestResult:
    (result,) = observed.results
    return result


def test_times_are_those_at_which_the_server_sent() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        for pause_s in (0.2, 0.05, 0.15, 0.1):
            await asyncio.sleep(pause_s)
            await exchange.event(token("x"))
        await exchange.finish(4)

    with Disturbance() as disturbance, stub(behave) as server:
        result = only(measure(server))
    tolerance_s = disturbance.tolerance_s(TOLERANCE_S)
    sent = server.exchanges[0].sent_at_s
    for arrived_s, sent_s in zip(result.arrivals_s, sent, strict=True):
        assert 0 <= arrived_s - sent_s < tolerance_s
    assert result.error is None
    assert result.ttft_s == pytest.approx(0.2, abs=tolerance_s)
    assert result.itls_s == pytest.approx([0.05, 0.15, 0.1], abs=tolerance_s)
    assert result.tpot_s == pytest.approx((sent[-1] - sent[0]) / 3, abs=tolerance_s / 3)


def test_counts_come_from_usage_and_text_is_whole() -> None:
    with stub(answer_five) as server:
        observed = measure(server, 20)
    assert len(observed.completed) == 20
    for result in observed.completed:
        assert (result.num_prompt_tokens, result.num_output_tokens) == (5, 5)
        assert result.text == "t0 t1 t2 t3 t4 "
        assert len(result.arrivals_s) == 5


def test_tokens_that_share_an_event_count_for_tpot() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(token("ab"))
        await asyncio.sleep(0.2)
        await exchange.event(token("cdef"))
        await exchange.finish(6)

    with Disturbance() as disturbance, stub(behave) as server:
        result = only(measure(server))
    assert result.num_output_tokens == 6
    assert len(result.itls_s) == 1  # the gap that a reader sees
    assert result.tpot_s == pytest.approx(0.2 / 5, abs=disturbance.tolerance_s(TOLERANCE_S) / 5)


def test_an_event_may_come_byte_by_byte_and_many_in_one_packet() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        for byte in sse(token("é1")):
            await exchange.chunk(bytes([byte]))
        crlf = sse(token("2")).replace(b"\n", b"\r\n")
        await exchange.chunk(b": keep-alive\n\n" + crlf + b"event: x\n" + sse(token("3")))
        await exchange.finish(3)

    with stub(behave) as server:
        result = only(measure(server))
    assert result.error is None
    assert result.text == "é123"
    assert len(result.arrivals_s) == 3


def test_first_and_last_chat_events_are_not_tokens() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(delta(role="assistant", content=""))
        await asyncio.sleep(0.15)
        await exchange.event(delta(content="Hel"))
        await exchange.event(delta(content="lo"))
        await exchange.event(delta("stop"))
        await exchange.finish(2)

    with stub(behave) as server:
        result = only(measure(server, endpoint="/v1/chat/completions"))
    assert server.exchanges[0].body["messages"][0]["role"] == "user"
    assert result.text == "Hello"
    assert result.ttft_s > 0.14
    assert len(result.arrivals_s) == 2


def test_a_token_without_text_is_a_token() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        for text in ("", "é", ""):  # half a character, a character, the end of the turn
            await exchange.event(token(text))
        await exchange.finish(3)

    with stub(behave) as server:
        assert len(only(measure(server)).arrivals_s) == 3


def test_without_usage_each_event_is_a_token() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(token("a"))
        await exchange.event(token("b"))
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.write(b"0\r\n\r\n")

    with stub(behave) as server:
        result = only(measure(server))
    assert (result.error, result.num_prompt_tokens, result.num_output_tokens) == (None, 4, 2)


def test_requests_carry_the_settings() -> None:
    with stub(answer_five) as server:
        measure(server)
    body = server.exchanges[0].body
    assert len(body["prompt"]) == 4
    assert body["max_tokens"] == 5
    assert body["temperature"] == 0
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body


def test_a_429_fails_with_its_message() -> None:
    async def behave(exchange: Exchange) -> None:
        if exchange.number % 2:
            await answer_five(exchange)
            return
        body = b'{"error": {"message": "the queue is full", "type": "rate_limit_error"}}'
        await exchange.head("429 Too Many Requests", f"Content-Length: {len(body)}")
        await exchange.write(body)

    with stub(behave) as server:
        observed = measure(server, 10)
    assert len(observed.completed) == 5
    assert {result.status for result in observed.failed} == {429}
    assert {result.error for result in observed.failed} == {"HTTP 429: the queue is full"}


async def error_mid_stream(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event(token("a"))
    await exchange.event({"error": {"message": "the engine died", "code": 500}})
    await exchange.write(b"0\r\n\r\n")


async def close_mid_stream(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event(token("a"))
    exchange.writer.close()


async def close_before_answer(exchange: Exchange) -> None:
    exchange.writer.close()


async def end_without_done(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event(token("a"))
    await exchange.write(b"0\r\n\r\n")


async def speak_no_http(exchange: Exchange) -> None:
    await exchange.write(b"SSH-2.0-OpenSSH_9.2\r\n")


async def stream_no_json(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.chunk(b"data: {oops\n\n")


async def never_answer(exchange: Exchange) -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (error_mid_stream, "the engine died"),
        (close_mid_stream, "in the middle of its response"),
        (close_before_answer, "without a response"),
        (end_without_done, "without [DONE]"),
        (speak_no_http, "not HTTP/1.1"),
        (stream_no_json, "invalid event"),
        (never_answer, "within 0.5 s"),
    ],
)
def test_a_broken_response_fails_with_the_reason(behave: Behaviour, message: str) -> None:
    with stub(behave) as server:
        result = only(measure(server, timeout_s=0.5))
    assert result.error is not None
    assert message in result.error


def test_one_broken_response_does_not_affect_the_others() -> None:
    async def behave(exchange: Exchange) -> None:
        await (close_mid_stream if exchange.number == 3 else answer_five)(exchange)

    with stub(behave) as server:
        observed = measure(server, 10)
    assert (len(observed.completed), len(observed.failed)) == (9, 1)


def test_a_response_may_end_with_its_connection() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head("200 OK", "Connection: close")
        await exchange.write(sse(token("a")) + sse(usage(1)) + b"data: [DONE]\n\n")
        exchange.writer.close()

    with stub(behave) as server:
        observed = measure(server, 3, max_concurrency=1)
    assert len(observed.completed) == 3
    assert server.num_connections == 3


def test_connections_are_reused() -> None:
    with stub(answer_five) as server:
        observed = measure(server, 30, max_concurrency=3)
    assert len(observed.completed) == 30
    assert server.num_connections <= 3


def test_an_idle_connection_that_was_closed_is_replaced() -> None:
    async def behave(exchange: Exchange) -> None:
        if exchange.number == 1:  # the second request, on the connection of the first
            exchange.writer.close()
        else:
            await answer_five(exchange)

    with stub(behave) as server:
        observed = measure(server, 3, max_concurrency=1)
    assert len(observed.completed) == 3
    assert server.num_connections == 2


def test_concurrency_is_never_exceeded_and_is_reached() -> None:
    running, seen = 0, []

    async def behave(exchange: Exchange) -> None:
        nonlocal running
        running += 1
        seen.append(running)
        await exchange.head()
        await exchange.event(token("a"))
        await asyncio.sleep(0.01)
        running -= 1
        await exchange.finish(1)

    with stub(behave) as server:
        measure(server, 40, max_concurrency=4)
    assert max(seen) == 4


def test_open_loop_requests_are_sent_when_they_are_due() -> None:
    async def behave(exchange: Exchange) -> None:
        await asyncio.sleep(0.2)  # slower than requests arrive: an open loop does not wait for it
        await answer_five(exchange)

    with Disturbance() as disturbance, stub(behave) as server:
        observed = measure(server, 30, rate=60.0)
    assert len(observed.completed) == 30
    assert observed.max_send_delay_s < disturbance.tolerance_s(TOLERANCE_S)


def test_ctrl_c_keeps_finished_results_and_disconnects_the_rest() -> None:
    under_way = threading.Semaphore(0)  # one for each that is complete, or has started

    async def behave(exchange: Exchange) -> None:
        if exchange.number < 2:
            await answer_five(exchange)
            under_way.release()
            return
        await exchange.head()
        for i in range(1000):
            await exchange.event(token("x"))
            if i == 10:
                under_way.release()
            await asyncio.sleep(0.01)

    async def go(url: str) -> Replay:
        requests = make_requests(WorkloadConfig(num_prompts=4, input_len=4))
        async with HttpTarget(TargetConfig(base_url=url, model="stub")) as target:
            task = asyncio.create_task(replay(target, requests))
            for _ in range(4):
                await asyncio.to_thread(under_way.acquire, timeout=10)
            await asyncio.sleep(0.1)  # by now the client has read it
            task.cancel()
            observed = await task
            await asyncio.sleep(0.3)
            return observed

    with stub(behave) as server:
        observed = run(go(server.url))
    assert observed.is_interrupted
    assert len(observed.completed) == 2
    assert [exchange.is_cut for exchange in server.exchanges] == [False, False, True, True]


# The command.

FEW = ["--num-prompts", "8", "--random-input-len", "4", "--random-output-len", "5"]


def test_json_has_vllms_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *FEW, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    summary = json.loads(line)
    assert summary["model_id"] == "stub"
    assert summary["completed"] == 8
    assert summary["total_output_tokens"] == 40
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for name in ("mean", "median", "std", "p90", "p95", "p99"):
            assert summary[f"{name}_{metric}_ms"] >= 0


def test_without_a_flag_only_text_is_printed_and_no_file_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert not any("{" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_result_has_every_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--json"]
    with stub(answer_five) as server:
        # OpenAI's clients take a base URL that ends in /v1, so it is understood here too.
        argv = ["--base-url", server.url + "/v1", *FEW, *flags, "--result-filename", "r.json"]
        assert main(argv) == 0
    (line,) = capsys.readouterr().out.splitlines()
    saved = json.loads((tmp_path / "r.json").read_bytes())
    assert json.loads(line).items() <= saved.items()
    assert saved["output_lens"] == [5] * 8
    assert len(saved["ttfts"]) == len(saved["itls"]) == len(saved["generated_texts"]) == 8


def test_bench_waits_for_a_server_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(answer_five) as server:
        server.num_loading_responses = 2
        assert main(["--base-url", server.url, *FEW]) == 0
    assert "still loading" in capsys.readouterr().err


def test_bench_waits_for_a_server_that_lists_its_model_while_it_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stub(answer_five) as server:
        server.num_unhealthy_responses = 2
        assert main(["--base-url", server.url, *FEW]) == 0
    assert "HTTP 503: Loading model" in capsys.readouterr().err


def test_a_full_disk_loses_a_file_and_not_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--append-result", "--result-dir", "/dev", "--result-filename", "full", "--json"]
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *FEW, *flags]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["completed"] == 8
    assert "/dev/full cannot be written: No space left on device" in printed.err
    assert "Traceback" not in printed.err


def test_an_address_without_tls_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["--base-url", f"https://127.0.0.1:{server.server_port}", *FEW]) == 1
        thread.join()
    # The others are that server's log.
    *_, line = capsys.readouterr().err.splitlines()
    assert line.endswith("it does not speak TLS; is its URL http://?")


def test_a_reader_that_closes_early_gets_no_traceback() -> None:
    with stub(answer_five) as server:
        command = [sys.executable, "-m", "penstock", "bench", "--base-url", server.url, *FEW]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        process.wait(timeout=60)
    assert "Traceback" not in errors and "BrokenPipe" not in errors


def test_a_drawn_seed_is_named_so_that_the_run_can_be_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *FEW, "--json"]) == 0
        printed = capsys.readouterr()
        assert f"seed {json.loads(printed.out)['seed']};" in printed.err
        assert main(["--base-url", server.url, *FEW, "--seed", "5"]) == 0
    assert "seed" not in capsys.readouterr().err


def test_a_missing_server_gets_an_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(answer_five) as server:
        url = server.url
    assert main(["--base-url", url, "--ready-timeout", "0"]) == 1
    printed = capsys.readouterr().err
    assert "connection refused" in printed and "--ready-timeout" in printed
    assert "Traceback" not in printed


def test_a_request_that_the_server_refuses_stops_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def behave(exchange: Exchange) -> None:
        body = b'{"error": {"message": "the prompt has 4 tokens and 3 fit"}}'
        await exchange.head("400 Bad Request", f"Content-Length: {len(body)}")
        await exchange.write(body)

    with stub(behave) as server:
        assert main(["--base-url", server.url, *FEW]) == 1
    assert "the prompt has 4 tokens and 3 fit" in capsys.readouterr().err
    assert len(server.exchanges) == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--request-rate", "-1"], "--request-rate is -1"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--percentile-metrics", "tft"], "unknown metric 'tft'"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--goodput", "tpot=3"], "'tpot=3' is not valid"),
        (
            ["--endpoint", "/v1/chat/completions", "--prompt-format", "ids"],
            "does not accept token ids",
        ),
        (["--dataset-name", "nope"], "invalid choice: 'nope'"),
        (["--nope"], "unknown flag --nope; see penstock bench --help"),
        (["--num-promts", "3"], "unknown flag --num-promts; did you mean --num-prompts?"),
        (["--num-prompts", "ten"], "--num-prompts: invalid int value: 'ten'"),
        (["prompts"], "unexpected argument 'prompts'"),
    ],
)
def test_a_wrong_flag_gets_an_error_message(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert sentence in capsys.readouterr().err

"""`penstock top` as it is seen: drawn at many sizes, once as text, and live in a terminal."""

import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.loadtest.top.scrape import History, parse
from penstock.loadtest.top.view import ASCII, MINUTE_S, View, draw, text
from tests.support.paths import ROOT
from tests.support.serving import RunningServer, running_server, wait_until
from tests.support.terminal import Terminal, plain

LATENCY = "time_to_first_token_seconds"
STEP_S = 0.002


def metrics(scale: int) -> str:
    """The metrics of a server that has done the same work `scale` times."""
    lines = [
        'penstock_model_info{model_name="tiny",device="cpu"} 1',
        f"penstock_generated_tokens_total {100 * scale}",
        f"penstock_prompt_tokens_total {50 * scale}",
        "penstock_running_sequences 7",
        "penstock_waiting_sequences 3",
        f'penstock_requests_total{{outcome="stop"}} {4 * scale}',
        "penstock_kv_used_blocks 50",
        "penstock_kv_idle_blocks 25",
        "penstock_kv_free_blocks 25",
        "penstock_kv_block_size_tokens 16",
        f"penstock_prefix_query_tokens_total {40 * scale}",
        f"penstock_prefix_hit_tokens_total {10 * scale}",
        'penstock_peak_bandwidth_bytes_per_second{peak="datasheet"} 4.8e12',
        'penstock_peak_bandwidth_bytes_per_second{peak="measured"} 4.2e12',
        'penstock_peak_flops_per_second{peak="datasheet"} 9.89e14',
    ]
    for number, kind in enumerate(("decode", "prefill", "mixed", "all"), 5):
        of = f'{{class="{kind}",peak='
        lines += [
            f'penstock_model_bandwidth_utilization_ratio{of}"datasheet"}} 0.{number}',
            f'penstock_model_bandwidth_utilization_ratio{of}"measured"}} 0.{number}5',
            f'penstock_model_flops_utilization_ratio{of}"datasheet"}} 0.0{number}',
        ]
    lines += [
        f'penstock_{LATENCY}_bucket{{le="0.01"}} {2 * scale}',
        f'penstock_{LATENCY}_bucket{{le="0.02"}} {4 * scale}',
        f'penstock_{LATENCY}_bucket{{le="+Inf"}} {4 * scale}',
        f"penstock_{LATENCY}_sum {0.04 * scale}",
    ]
    return "\n".join(lines) + "\n"


def view_of(*scrapes: str, **fields: object) -> View:
    history = History(MINUTE_S)
    for second, scrape in enumerate(scrapes):
        history.add(parse(scrape, float(second)))
    whole = history.whole()
    long = ("last minute", whole) if whole else None
    return View(url="http://x:1", history=history, long=long, **fields)  # type: ignore[arg-type]


BUSY = view_of(metrics(1), metrics(2), metrics(4))


def shown(view: View, width: int = 80, height: int = 24) -> str:
    return "\n".join(text(line) for line in draw(view, width, height))


def test_it_shows_rates_latencies_utilization_and_memory_on_80_by_24() -> None:
    picture = shown(BUSY)
    for pattern in (
        r"tiny",
        r"output +200 +[▁-█]+ +prompt +100",
        r"running +7 .* waiting +3",
        r"requests +8/s +stop 16",
        r"TTFT +10\.0 ms +19\.0 ms +19\.8 ms +10\.0 ms",
        r"decode .* 50\.0 % .* 55\.0 % .* 5\.0 %",
        r"all .* 80\.0 % .* 85\.0 % .* 8\.0 %",
        r"KV blocks +50\.0 % █+▒+░+ +used 50 +idle 25 +free 25",
        r"prefix +25\.0 %",
    ):
        assert re.search(pattern, picture), (pattern, picture)
    # Nothing is cut off.
    assert len(draw(BUSY, 80)) <= 24
    assert (
        max(len(text(line)) for line in draw(BUSY, 1000))
        > 80
        >= max(len(text(line)) for line in draw(BUSY, 80))
    )


@pytest.mark.parametrize("width", [1, 2, 10, 20, 40, 59, 60, 80, 81, 120, 300])
@pytest.mark.parametrize("height", [1, 5, 24, 60])
def test_it_fits_every_size(width: int, height: int) -> None:
    for view in (BUSY, view_of(), view_of(metrics(1)), view_of(error="gone", keys="q quits")):
        lines = draw(view, width, height)
        assert 1 <= len(lines) <= height
        assert all(len(text(line)) <= width for line in lines)


def test_a_small_terminal_drops_gaps_and_the_shorter_span_before_numbers() -> None:
    picture = shown(BUSY, 60, 15)
    lines = picture.splitlines()
    assert "" not in lines and "last minute" in picture and "last 1.0 s" not in picture
    assert {"TTFT", "queue", "decode", "mixed"} <= {line.split()[0] for line in lines}


def test_a_missing_metric_is_a_dash() -> None:
    picture = shown(view_of("penstock_running_sequences 2\n", "penstock_running_sequences 2\n"))
    assert re.search(r"output +- ", picture) and re.search(r"TTFT( +-){6}", picture)
    assert "the server has no peak rates of this device" in picture
    assert re.search(r"running +2 ", picture)


def test_a_server_cannot_write_to_the_terminal() -> None:
    hostile = 'penstock_model_info{model_name="\x1b[2Jevil\u7269\u200b"} 1\n'
    picture = shown(view_of(hostile))
    assert "?[2Jevil??" in picture and "\x1b" not in picture


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert shown(view_of(metrics(1), metrics(2), glyphs=ASCII)).isascii()


def test_an_unreachable_server_is_shown_with_the_reason_and_for_how_long() -> None:
    picture = shown(view_of(metrics(1), error="connection refused", unreachable_s=75))
    assert "The server is unreachable: connection refused" in picture
    assert "It last responded 1m 15s ago" in picture


# Against the real server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--scripted-step-ms", str(STEP_S * 1e3)) as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with running_server("--api-key", "secret") as running:
        yield running


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "PENSTOCK_API_KEY")}
    return {**kept, "TERM": "xterm", "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)} | more


def once(url: str, *flags: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "top", url, "--once", "--interval", "0.2", *flags]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment(**env), timeout=30
    )


def test_once_prints_a_known_load_exactly(server: RunningServer) -> None:
    for _ in range(5):
        server.complete(max_tokens=20, ignore_eos=True).raise_for_status()
    server.wait_until_idle()
    before = server.metric('requests_total{outcome="length"}')
    printed = once(server.url)
    assert printed.returncode == 0 and not printed.stderr
    assert "\x1b" not in printed.stdout
    assert f"length {before:,.0f}" in printed.stdout and before >= 5
    assert re.search(r"output +0 ", printed.stdout) and re.search(r"running +0 ", printed.stdout)
    assert re.search(r"TTFT( +-){3} .*[mu]s", printed.stdout)  # none just now, some since the start


@contextmanager
def load(server: RunningServer, num_streams: int = 4) -> Iterator[None]:
    """Streams that run until the end of the block."""
    ended = threading.Event()

    def stream() -> None:
        while not ended.is_set():
            server.complete(max_tokens=100, ignore_eos=True)

    threads = [threading.Thread(target=stream) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: server.metric("running_sequences") == num_streams)
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_once_under_load_agrees_with_the_counters(server: RunningServer) -> None:
    with load(server):
        began_s, before = time.monotonic(), server.metric("generated_tokens_total")
        printed = once(server.url, "--interval", "0.5")
        num_tokens = server.metric("generated_tokens_total") - before
        elapsed_s = time.monotonic() - began_s
    found = re.search(r"output +([\d,.]+)", printed.stdout)
    assert found
    rate = float(found[1].replace(",", ""))
    # Of the tokens that were generated meanwhile, none came faster than the steps' pace, outside of
    # the half second either; so the machine's other work moves no bound.
    fastest = 4 / STEP_S
    assert num_tokens - fastest * (elapsed_s - 0.5) <= rate * 0.5 * 1.1
    assert 0 < rate * 0.5 <= num_tokens * 1.1


def test_an_api_key_is_required_and_accepted(locked: RunningServer) -> None:
    refused = once(locked.url)
    assert refused.returncode == 1 and "give it with --api-key" in refused.stderr
    assert once(locked.url, PENSTOCK_API_KEY="secret").returncode == 0
    with Top(locked.url, flags=("--api-key", "secret")) as terminal:
        terminal.wait_for("running")


class Top(Terminal):
    """`penstock top` in a pseudo-terminal."""

    def __init__(self, url: str, flags: tuple[str, ...] = (), **env: str) -> None:
        command = [sys.executable, "-m", "penstock", "top", url, "--interval", "0.2", *flags]
        super().__init__(command, environment(**env))

    def end(self) -> int:
        """Its exit status, once it has ended and left the terminal as it was."""
        code = self.exit_code()
        assert self.output.endswith("\x1b[?1049l"), self.output[-200:]
        assert "\x1b[?25h" in self.output[-40:]  # the cursor is back
        assert termios.tcgetattr(self.fd) == self.before
        assert "Traceback" not in self.output
        return code


def test_live_it_follows_the_load_and_q_restores_the_terminal(server: RunningServer) -> None:
    with load(server), Top(server.url) as terminal:
        terminal.wait_for(r"output +[\d,]{3,} +[▁-█]{2}")
        terminal.wait_for(r"running +4 ")
        assert "\x1b[?1049h" in terminal.output and "\x1b[32m" in terminal.output
        terminal.press(b"q")
        assert terminal.end() == 0


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_however_it_ends_the_terminal_is_restored(server: RunningServer, how: str) -> None:
    with Top(server.url) as terminal:
        terminal.wait_for("running")
        # The session has no controlling terminal, so that Ctrl-C comes as its signal.
        terminal.process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        assert terminal.end() == 0


def test_suspending_restores_the_terminal_and_resuming_takes_it_again(
    server: RunningServer,
) -> None:
    with Top(server.url) as terminal:
        terminal.wait_for("running")
        terminal.process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert terminal.read().endswith("\x1b[?1049l")
        assert termios.tcgetattr(terminal.fd) == terminal.before
        terminal.output = ""
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_for("running")
        assert terminal.output.startswith("\x1b[?1049h")
        terminal.press(b"q")
        assert terminal.end() == 0


def test_it_is_redrawn_when_the_terminal_is_resized(server: RunningServer) -> None:
    with Top(server.url) as terminal:
        terminal.wait_for("running")
        terminal.read()
        terminal.output = ""
        terminal.resize(10, 50)
        terminal.process.send_signal(signal.SIGWINCH)
        wait_until(lambda: "\x1b[H" in terminal.read())
        picture = terminal.output.split("\x1b[H")[-1]
        assert not re.search(r"[^\n]\x1b\[K", picture)  # it would clear the last column's character
        lines = re.split(r"\r*\n", plain(picture))
        assert len(lines) <= 10 and max(map(len, lines)) <= 50
        terminal.press(b"q")
        assert terminal.end() == 0


def test_no_color_is_respected(server: RunningServer) -> None:
    with Top(server.url, NO_COLOR="1") as terminal:
        terminal.wait_for("running")
        terminal.press(b"q")
        assert terminal.end() == 0
        assert not re.search(r"\x1b\[\d*m", terminal.output)


def test_a_server_that_dies_is_shown_as_unreachable() -> None:
    with running_server() as server, Top(server.url) as terminal:
        terminal.wait_for("running")
        server.process.kill()
        terminal.wait_for("The server is unreachable: connection refused")
        terminal.wait_for("It last responded .* ago; retrying")
        assert terminal.process.poll() is None
        terminal.press(b"q")
        assert terminal.end() == 0


def test_a_wrong_address_is_an_error_message_on_a_terminal_too(locked: RunningServer) -> None:
    with Top(locked.url) as terminal:
        assert terminal.process.wait(timeout=60) == 1
        assert "give it with --api-key" in plain(terminal.read())
        assert termios.tcgetattr(terminal.fd) == terminal.before


@pytest.mark.parametrize(
    "value", ["NaN", "+Inf", "-Inf", "1e308", "-1e308", "-5", "1e29", "1e-300"]
)
def test_whatever_numbers_a_server_sends_it_is_drawn(value: str) -> None:
    history = History(MINUTE_S)
    names = [line.rpartition(" ")[0] for line in metrics(1).splitlines()]
    for number in range(3):
        sent = [f"{name} {value if index % 3 == number else 7}" for index, name in enumerate(names)]
        history.add(parse("\n".join([*sent, f"process_start_time_seconds {value}"]), number))
        window = history.last_interval()
        long = ("long", window) if window else None
        draw(View(url="", history=history, long=long), 100)


def test_a_bound_that_is_no_number_is_not_of_penstocks_metrics() -> None:
    with pytest.raises(ValueError, match="often"):
        parse('penstock_step_tokens_bucket{le="often"} 1\n', 0.0)

"""`penstock chat` as it is used: through a pipe, and in a terminal."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.serving import RunningServer, free_port, running_server, wait_until
from tests.support.stub_server import Exchange, Stub, delta, sse, stub
from tests.support.terminal import Terminal, plain

_DIM = "\x1b[2m"


async def say_hello(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event(delta(role="assistant", content=""))
    await exchange.event(delta(reasoning_content="They greet"))
    await exchange.event(delta(reasoning_content=" me."))
    await exchange.event(delta(content="Hel"))
    await exchange.event(delta(content="lo"))
    await exchange.event(delta("stop"))
    await exchange.finish(4)


@pytest.fixture
def hello() -> Iterator[Stub]:
    with stub(say_hello) as server:
        yield server


@pytest.fixture(scope="module")
def endless() -> Iterator[RunningServer]:
    """A real server, whose answers take minutes."""
    with running_server("--scripted-step-ms", "5") as server:
        yield server


def environment(**more: str) -> dict[str, str]:
    keys = ("PENSTOCK_API_KEY", "OPENAI_API_KEY", "NO_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in keys}
    return {**kept, "TERM": "xterm", "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)} | more


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "chat", "--base-url", url, *flags]


def piped(url: str, *flags: str, text: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(url, *flags),
        input=text,
        capture_output=True,
        text=True,
        env=environment(**env),
        timeout=60,
    )


def chatting(url: str, *flags: str, **env: str) -> Terminal:
    return Terminal(command(url, *flags), environment(**env))


def messages(exchange: Exchange) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in exchange.body["messages"]]


# Through a pipe.


def test_a_pipe_is_one_message_and_its_answer_is_all_that_is_printed(hello: Stub) -> None:
    done = piped(hello.url, text="Say hello.\n\nPlease.\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello\n", "")
    assert messages(hello.exchanges[0]) == [("user", "Say hello.\n\nPlease.")]


def test_a_quick_message_is_answered_as_its_flags_say(hello: Stub) -> None:
    flags = ("--system", "Be kind.", "--max-tokens", "9", "--temperature", "0", "--seed", "7")
    done = piped(hello.url, "-q", "Hi", *flags, "--top-p", "0.5", "--model", "mine")
    assert (done.returncode, done.stdout) == (0, "Hello\n")
    body = hello.exchanges[0].body
    assert body.pop("messages") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    assert body == {
        "model": "mine",
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_line_that_does_not_end_is_refused_before_it_fills_the_memory() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def send() -> None:
            for answer in (b"", b"data: "):  # whether it is ready; and the answer
                with listening.accept()[0] as client, contextlib.suppress(OSError):
                    client.recv(1 << 16)
                    client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)
                    while answer:
                        client.sendall(b"a" * (1 << 16))

        thread = threading.Thread(target=send)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done = piped(url, "--model", "mine", "--url", url, text="Hi")
        thread.join()
    assert done.returncode == 1 and "sent a line of more than" in done.stderr, done.stderr


def test_an_empty_message_is_refused(hello: Stub) -> None:
    done = piped(hello.url, text="\n")
    assert done.returncode == 2 and "there is no message" in done.stderr
    assert not hello.exchanges


def test_without_a_server_it_says_how_to_start_one() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = piped(url, text="Hi")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"penstock chat: error: no server answers at {url} (Connection refused); start one with "
        "`penstock serve`, or name another with --base-url\n"
    )


def test_a_server_that_loads_is_waited_for(hello: Stub) -> None:
    hello.num_loading_responses = 2
    done = piped(hello.url, text="Hi")
    assert (done.returncode, done.stdout) == (0, "Hello\n")
    assert done.stderr == "waiting: still loading\n"


def test_a_key_is_required_and_accepted_from_the_flag_and_the_environment() -> None:
    with running_server("--api-key", "secret") as server:
        refused = piped(server.url, text="Hi")
        assert refused.returncode == 1 and "give it with --api-key" in refused.stderr
        for flags, env in ((("--api-key", "secret"), {}), ((), {"PENSTOCK_API_KEY": "secret"})):
            done = piped(server.url, "--max-tokens", "5", *flags, text="Hi", **env)
            assert done.returncode == 0 and done.stdout.strip()


def test_an_error_in_the_middle_of_an_answer_is_told() -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(delta(content="Hel"))
        await exchange.event({"error": {"message": "the engine ended"}})

    with stub(fail) as server:
        done = piped(server.url, text="Hi")
    assert (done.returncode, done.stdout) == (1, "Hel\n")
    assert done.stderr == "penstock chat: error: the engine ended\n"


def test_a_connection_that_is_lost_is_no_end_of_the_answer() -> None:
    async def leave(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        await exchange.write(sse(delta(content="Hel")))
        exchange.writer.close()

    with stub(leave) as server:
        done = piped(server.url, text="Hi")
    assert done.returncode == 1
    assert "closed the connection in the middle of the answer" in done.stderr


def test_an_answer_with_a_finish_reason_is_whole_without_done() -> None:
    async def end_early(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        await exchange.write(sse(delta(content="Hello")) + sse(delta("stop")))
        exchange.writer.close()

    with stub(end_early) as server:
        done = piped(server.url, text="Hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello\n", "")


def test_what_is_no_chat_completion_is_told() -> None:
    async def babble(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(["what"])

    with stub(babble) as server:
        done = piped(server.url, text="Hi")
    assert done.returncode == 1
    assert 'an event that is no chat completion: ["what"]' in done.stderr


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    async def command_the_terminal(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(delta(content="a\x1b]0;title\x07b\tc\n\x9b2Jd👩‍🚀"))
        await exchange.finish(1)

    with stub(command_the_terminal) as server:
        assert piped(server.url, text="Hi").stdout == "a]0;titleb\tc\n2Jd👩‍🚀\n"


# In a terminal.


def test_a_conversation_remembers_its_turns_and_tells_what_they_cost(hello: Stub) -> None:
    with chatting(hello.url) as terminal:
        terminal.wait_for(r"stub at http\S+; .*\r\n> $")
        terminal.press(b"Hi\n")
        terminal.wait_for(r"Hello\r\n4 tokens, TTFT \d+ ms, [\d.]+ tokens/s\r\n> $")
        terminal.press(b"Again\n")
        wait_until(lambda: len(hello.exchanges) == 2)
        terminal.wait_for(r"(?s)Hello.*Hello.*> $")
        terminal.press(b"\x04")
        assert terminal.exit_code() == 0
    assert messages(hello.exchanges[1]) == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Again"),
    ]


def test_reasoning_is_dim_and_apart_from_the_answer(hello: Stub) -> None:
    with chatting(hello.url) as terminal:
        terminal.wait_for("> $")
        terminal.press(b"Hi\n")
        terminal.wait_for("tokens/s")
        assert f"{_DIM}They greet" in terminal.output
        assert "They greet me.\r\n\r\nHello\r\n" in plain(terminal.output)
        assert f"{_DIM}Hel" not in terminal.output
    with chatting(hello.url, NO_COLOR="1") as terminal:
        terminal.wait_for("> $")
        terminal.press(b"Hi\n")
        terminal.wait_for("tokens/s")
        assert _DIM not in terminal.output


def test_ctrl_c_stops_an_answer_and_keeps_its_beginning(endless: RunningServer) -> None:
    flags = ("--max-tokens", "50000", "--seed", "1")
    with chatting(endless.url, *flags) as terminal:
        terminal.wait_for("> $")
        terminal.press(b"Once\n")
        wait_until(lambda: endless.metric("running_sequences") == 1)
        terminal.wait_for(r"Once\r\n.{20}")
        terminal.press(b"\x03")
        terminal.wait_for(r"~\d+ tokens, .*stopped\r\n> $")
        endless.wait_until_idle()
        terminal.press(b"/save /dev/null/no\n")
        terminal.wait_for("/dev/null/no cannot be written")
        terminal.press(b"\x03")  # at an empty prompt
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.output


def test_ctrl_c_discards_a_line_before_it_leaves(hello: Stub) -> None:
    with chatting(hello.url) as terminal:
        terminal.wait_for("> $")
        terminal.press(b"Hi\n")
        terminal.wait_for(r"tokens/s\r\n> $")
        terminal.press(b"half a li")
        terminal.wait_for("half a li$")
        terminal.press(b"\x03")
        terminal.wait_for(r"half a li\^?C?\r\n> $")
        terminal.press(b"\x03")
        assert terminal.exit_code() == 0
    assert len(hello.exchanges) == 1


def test_a_line_that_ends_with_a_backslash_is_continued(hello: Stub) -> None:
    with chatting(hello.url) as terminal:
        terminal.wait_for("> $")
        terminal.press(b"one\\\n")
        terminal.wait_for("… $")
        terminal.press(b"two\n")
        terminal.wait_for("tokens/s")
    assert messages(hello.exchanges[0]) == [("user", "one\ntwo")]


def test_an_error_leaves_the_conversation_as_it_was() -> None:
    async def fail_at_first(exchange: Exchange) -> None:
        if exchange.number:
            await say_hello(exchange)
            return
        body = json.dumps({"error": {"message": "the prompt has 9 tokens"}}).encode()
        await exchange.head("400 Bad Request", f"Content-Length: {len(body)}")
        await exchange.write(body)

    with stub(fail_at_first) as server, chatting(server.url) as terminal:
        terminal.wait_for("> $")
        terminal.press(b"too long\n")
        terminal.wait_for(r"error: the prompt has 9 tokens\r\n> $")
        terminal.press(b"short\n")
        terminal.wait_for("tokens/s")
        assert messages(server.exchanges[1]) == [("user", "short")]


def test_commands_are_completed_and_carried_out(hello: Stub, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with chatting(hello.url) as terminal:
        terminal.wait_for("> $")
        terminal.press(b"/sys\tBe brief.\n")
        terminal.wait_for(r"system prompt: Be brief\.\r\n> $")
        terminal.press(b"Hi\n")
        terminal.wait_for("tokens/s")
        terminal.press(f"/save {file}\n".encode())
        terminal.wait_for("saved 3 messages to")
        terminal.press(b"/quit\n")
        assert terminal.exit_code() == 0
    saved: Any = json.loads(file.read_text(encoding="utf-8"))
    assert [each["role"] for each in saved] == ["system", "user", "assistant"]

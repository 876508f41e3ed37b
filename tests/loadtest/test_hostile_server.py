"""What is printed of a server: nothing that it says can command the terminal that shows it."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

import pytest

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\rb"
BENCH = "--num-prompts 1 --random-input-len 4 --random-output-len 4 --ready-timeout 0 --num-warmups"
COMMANDS = {
    "loadtest.top.cli": "URL --once --interval 0.1",
    "loadtest.chat.cli": "--url URL -q hi",
    "loadtest.bench.cli": f"--base-url URL {BENCH} 0",
    "server.command_line.health_check": "--port PORT",
}


def answer(status: str, body: object) -> bytes:
    data = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{data}".encode()


def models_first(name: str, then: bytes) -> Callable[[str], bytes]:
    """The server lists a model of this name, and answers otherwise with `then`."""
    listed = answer("200 OK", {"data": [{"id": name}]})
    return lambda path: listed if path == "/v1/models" else then


ERROR = {"error": {"message": HOSTILE}}
EVENT = {"choices": [{"text": HOSTILE, "delta": {"content": HOSTILE}, "finish_reason": "stop"}]}
SERVERS: dict[str, Callable[[str], bytes]] = {
    "no HTTP": lambda path: f"{HOSTILE}\r\n\r\n".encode(),
    "reason": lambda path: answer(f"500 {HOSTILE.replace(chr(13), '')}", ""),
    "error": lambda path: answer("400 Bad", ERROR),
    "key": lambda path: answer("401 No", ERROR),
    "loading": lambda path: answer("503 Wait", ERROR),
    "text": lambda path: answer("400 Bad", HOSTILE),
    "name": models_first(HOSTILE, answer("400 Bad", ERROR)),
    "stream": models_first("m", answer("200 OK", f"data: {json.dumps(EVENT)}\n\n")),
    "late error": models_first("m", answer("200 OK", f"data: {json.dumps(ERROR)}\n\n")),
    "no event": models_first("m", answer("200 OK", f"data: {HOSTILE}\n\n")),
    "no stream": models_first("m", answer("200 OK", f"<{HOSTILE}")),
    "labels": lambda path: answer("200 OK", f'penstock_model_info{{name="{HOSTILE}"}} 1\n'),
}


@contextmanager
def listening(respond: Callable[[str], bytes]) -> Iterator[int]:
    """Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):
                    request = connection.recv(1 << 16)
                    if not request:  # it is to end
                        return
                    connection.sendall(respond(request.split()[1].decode()))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            socket.create_connection(listener.getsockname()).close()
            thread.join()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", SERVERS)
def test_no_control_character_of_a_server_is_printed(
    command: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(SERVERS[kind]) as port:
        given = COMMANDS[command].replace("URL", f"http://127.0.0.1:{port}")
        import_module(f"penstock.{command}").main(given.replace("PORT", str(port)).split())
    out, err = capsys.readouterr()
    assert out or err
    assert not {each for each in out + err if not each.isprintable()} - {"\n", "\t"}

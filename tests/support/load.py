"""A load that changes every series of /metrics: long, short, cancelled and invalid requests."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from tests.support.serving import MODEL

_TEXT = "Once upon a time there was a server that kept its keys and values in blocks. "
_TIMEOUT_S = 60.0


@contextlib.contextmanager
def load_on(url: str) -> Iterator[None]:
    """Runs in the background during the block."""
    is_over = threading.Event()
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=_repeat, args=(url, send, is_over, errors))
        for send in (
            _stream,
            _stream,
            _stream,
            _stream,
            _sample_several,
            _disconnect,
            _send_invalid,
        )
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def _repeat(
    url: str,
    send: Callable[[httpx.Client, random.Random], None],
    is_over: threading.Event,
    errors: list[BaseException],
) -> None:
    rng = random.Random(threading.get_ident())
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
            while not is_over.is_set():
                send(client, rng)
                # Pauses give moments without decodes, so that some steps are pure prefill.
                time.sleep(rng.choice((0.0, 0.1, 0.5)))
    except BaseException as error:
        errors.append(error)


def _stream(client: httpx.Client, rng: random.Random) -> None:
    prompt = _TEXT * rng.randint(1, 8) + str(rng.randint(0, 3))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.choice((4, 40, 300))}
    body |= {"stream": True, "ignore_eos": rng.random() < 0.5}
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        response.read()


def _sample_several(client: httpx.Client, rng: random.Random) -> None:
    """Four long samples, which outgrow the KV cache and so cause preemptions."""
    body = {"model": MODEL, "prompt": _TEXT, "max_tokens": 300, "n": 4, "ignore_eos": True}
    client.post("/v1/completions", json=body).raise_for_status()


def _disconnect(client: httpx.Client, rng: random.Random) -> None:
    """Disconnects after a few bytes."""
    body = {"model": MODEL, "prompt": _TEXT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        next(response.iter_bytes())


def _send_invalid(client: httpx.Client, rng: random.Random) -> None:
    response = client.post("/v1/completions", json={"model": MODEL, "prompt": 1.5})
    assert response.status_code == 400, response.text
    time.sleep(rng.random())

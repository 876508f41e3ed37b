"""A load that makes every series of /metrics move: long, short, shared, given up, too much."""

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
    """Runs beside the block, and has ended when the block has."""
    is_over = threading.Event()
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=_repeat, args=(url, ask, is_over, errors))
        for ask in (_ask, _ask, _ask, _ask, _ask_several, _leave, _ask_wrongly)
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
    ask: Callable[[httpx.Client, random.Random], None],
    is_over: threading.Event,
    errors: list[BaseException],
) -> None:
    chance = random.Random(threading.get_ident())
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
            while not is_over.is_set():
                ask(client, chance)
                # Pauses, so that there are moments with no decode: then steps are pure prefill.
                time.sleep(chance.choice((0.0, 0.1, 0.5)))
    except BaseException as error:
        errors.append(error)


def _ask(client: httpx.Client, chance: random.Random) -> None:
    prompt = _TEXT * chance.randint(1, 8) + str(chance.randint(0, 3))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": chance.choice((4, 40, 300))}
    body |= {"stream": True, "ignore_eos": chance.random() < 0.5}
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        response.read()


def _ask_several(client: httpx.Client, chance: random.Random) -> None:
    """Four long answers, which grow beyond what the pool holds and so cause preemptions."""
    body = {"model": MODEL, "prompt": _TEXT, "max_tokens": 300, "n": 4, "ignore_eos": True}
    client.post("/v1/completions", json=body).raise_for_status()


def _leave(client: httpx.Client, chance: random.Random) -> None:
    """Hangs up after a few bytes."""
    body = {"model": MODEL, "prompt": _TEXT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        next(response.iter_bytes())


def _ask_wrongly(client: httpx.Client, chance: random.Random) -> None:
    response = client.post("/v1/completions", json={"model": MODEL, "prompt": 1.5})
    assert response.status_code == 400, response.text
    time.sleep(chance.random())

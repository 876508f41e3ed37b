"""`--kv-offload-dir`: what one server computed, the next one reads."""

import signal
from pathlib import Path

import pytest

from tests.support.serving import RunningServer


def served(directory: Path) -> RunningServer:
    server = RunningServer("--scripted", "--kv-offload-dir", str(directory))
    server.wait_until_ready()
    return server


def ask(server: RunningServer, key: str = "a") -> tuple[str, int]:
    """The answer, and how much of the prompt was cached."""
    prompt = "The water of the river goes through the gate and turns the wheel. " * 12
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/completions", body, headers=headers).raise_for_status().json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_server_reads_the_blocks_of_the_one_before_for_the_same_key_alone(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    first = served(directory)
    try:
        text, num_cached = ask(first)
        assert num_cached == 0
        assert first.metric("kv_offload_query_tokens_total") > 0
        assert first.metric('kv_offload_misses_total{reason="absent"}') == 1
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(30) == 0
    finally:
        first.stop()
    for path in directory.rglob("*"):
        assert not path.stat().st_mode & 0o077, path
    again = served(directory)
    try:
        assert ask(again, key="b") == (text, 0)
        assert again.metric('kv_offload_blocks{tier="disk"}') > 0
        same, num_cached = ask(again)
        assert same == text and num_cached > 100
        assert again.metric("kv_offload_hit_tokens_total") == num_cached
        assert again.metric('kv_offload_read_bytes_total{tier="disk"}') > 0
        assert "that an earlier server wrote" in again.log()
    finally:
        again.stop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-offload-dir", "/proc/nowhere"), "--kv-offload-dir /proc/nowhere cannot be used"),
        (("--kv-offload-dir", "x", "--no-enable-prefix-caching"), "leave one of them out"),
        (("--kv-offload-dir", "x", "--batching", "static"), "would miss its batch"),
        (("--kv-offload-dir", "x", "--kv-offload-gb", "0"), "must be more than 0, and finite"),
        (("--kv-offload-gb", "5"), "name it with --kv-offload-dir"),
        (("--kv-offload-disk-gb", "5"), "name it with --kv-offload-dir"),
    ],
)
def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(
    flags: tuple[str, ...], message: str
) -> None:
    server = RunningServer("--scripted", *flags)
    try:
        code, errors = server.exit_code()
        assert code == 2 and message in errors
    finally:
        server.stop()

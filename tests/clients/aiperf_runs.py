"""aiperf's `profile`, NVIDIA's, with synthetic prompts of the model's own tokenizer.

What it requires that others do not: with `--use-server-token-count` its counts are the server's
usage, on each chunk if so asked, and of a streamed response that at `response.completed`, so that
one which its limit ended has none; a conversation grows by the answers, or by the id of the stored
response before; a trace's prompts share what their hashes say; and it reads `/metrics` meanwhile.
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_to_end
from tests.support.paths import DEMO_MODEL

NUM_PROMPT, NUM_OUTPUT, NUM_REQUESTS = 64, 16, 6
NUM_TURNS = 3
LENGTHS = ("--isl", str(NUM_PROMPT), "--osl", str(NUM_OUTPUT))
REQUESTS = (*LENGTHS, "--request-count", str(NUM_REQUESTS))
CONVERSATIONS = (*LENGTHS, "--num-sessions", "2", "--session-turns-mean", str(NUM_TURNS))
TO_THE_LIMIT = ("--use-server-token-count", "--extra-inputs", "ignore_eos:true")
AT_ONCE = ("--concurrency", "2")
WAITS_FOR_MODEL = ("--wait-for-model-timeout", "60", "--wait-for-model-mode", "both")


@dataclass(frozen=True)
class Run:
    """Where a run exported to, and its requests in the order in which they were sent."""

    folder: Path
    requests: list[dict[str, Any]]

    def values(self, name: str) -> list[float]:
        """A metric of every request that succeeded."""
        return [r["metrics"][name]["value"] for r in self.requests if not r.get("error")]

    def errors(self) -> list[str]:
        return [r["error"]["type"] for r in self.requests if r.get("error")]

    def num_on_server(self, name: str) -> float:
        """By how much a counter of the server grew meanwhile."""
        exported = json.loads((self.folder / "server_metrics_export.json").read_text())
        (series,) = exported["metrics"][name]["series"]
        return float(series["stats"]["total"])

    def check_times(self) -> None:
        """Checks that each answer's first token was there before its end."""
        firsts, ends = self.values("time_to_first_token"), self.values("request_latency")
        assert firsts and all(0 < first <= end for first, end in zip(firsts, ends, strict=True))

    def check_conversations(self) -> None:
        """Checks that every turn's prompt has what was said before."""
        lengths = defaultdict(list)
        for request, length in zip(
            self.requests, self.values("input_sequence_length"), strict=True
        ):
            lengths[request["metadata"]["conversation_id"]].append(length)
        assert [len(turns) for turns in lengths.values()] == [NUM_TURNS] * 2
        for turns in lengths.values():
            assert all(after - before > NUM_PROMPT for before, after in pairwise(turns))


def profile(folder: Path, server: str, endpoint: str, *options: str) -> Run:
    """A run that succeeds."""
    command = [
        *(str(Path(sys.executable).with_name("aiperf")), "profile"),
        *("--model", "penstock-demo", "--tokenizer", str(DEMO_MODEL), "--url", server),
        *("--endpoint-type", endpoint, *options),
        *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder)),
    ]
    run_to_end(command, folder=folder, env={"OMP_NUM_THREADS": "1"}, timeout_s=200)
    lines = (folder / "profile_export.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    return Run(folder, sorted(requests, key=lambda r: int(r["metadata"]["request_start_ns"])))


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        ("chat", (*WAITS_FOR_MODEL, "--streaming", "--per-chunk-usage", "--request-rate", "10")),
        ("completions", AT_ONCE),
        ("responses", AT_ONCE),
    ],
    ids=["chat", "text", "responses"],
)
def test_every_request_succeeds_with_the_tokens_that_were_asked_for(
    tmp_path: Path, demo: str, template_length: int, endpoint: str, options: tuple[str, ...]
) -> None:
    run = profile(tmp_path, demo, endpoint, *REQUESTS, *TO_THE_LIMIT, *options)
    num_prompt = NUM_PROMPT + (0 if endpoint == "completions" else template_length)
    assert not run.errors()
    assert run.values("input_sequence_length") == [num_prompt] * NUM_REQUESTS
    assert run.values("output_sequence_length") == [NUM_OUTPUT] * NUM_REQUESTS
    if "--streaming" in options:
        run.check_times()


def test_conversations_with_anthropics_messages_grow_by_the_answers(
    tmp_path: Path, demo: str
) -> None:
    run = profile(
        tmp_path, demo, "messages", "--streaming", *CONVERSATIONS, *TO_THE_LIMIT, *AT_ONCE
    )
    run.check_conversations()
    assert set(run.values("output_sequence_length")) == {NUM_OUTPUT}
    assert max(run.values("usage_prompt_cache_read_tokens")) >= NUM_PROMPT
    run.check_times()


def test_conversations_of_streamed_responses_continue_the_stored_ones(
    tmp_path: Path, demo: str
) -> None:
    """Of answers that end by themselves, since a limit's end is `response.incomplete`."""
    extra = {"structured_outputs": {"choice": ["yes"]}, "store": True}
    options = ("--streaming", "--use-server-token-count", "--export-level", "raw")
    run = profile(
        *(tmp_path, demo, "responses", *options, *CONVERSATIONS, *AT_ONCE),
        *("--extra-inputs", json.dumps(extra)),
    )
    run.check_conversations()
    assert all(1 <= num <= len("yes") for num in run.values("output_sequence_length"))
    run.check_times()
    lines = (tmp_path / "profile_export_raw.jsonl").read_text().splitlines()
    sent = [json.loads(line)["payload"] for line in lines]
    assert [len(body["input"]) for body in sent] == [1] * 2 * NUM_TURNS
    assert sum("previous_response_id" in body for body in sent) == 2 * (NUM_TURNS - 1)


def test_embeddings_are_benchmarked_by_the_tokens_of_their_inputs(
    tmp_path: Path, demo: str
) -> None:
    options = ("--isl", str(NUM_PROMPT), "--request-count", str(NUM_REQUESTS))
    run = profile(tmp_path, demo, "embeddings", *options, *AT_ONCE)
    assert run.values("input_sequence_length") == [NUM_PROMPT] * NUM_REQUESTS
    assert run.num_on_server("penstock_prompt_tokens") == NUM_PROMPT * NUM_REQUESTS


def test_passages_are_ranked(tmp_path: Path, demo: str) -> None:
    options = ("--request-count", str(NUM_REQUESTS), "--rankings-passages-mean", "5")
    lengths = ("--rankings-passages-prompt-token-mean", "32")
    run = profile(tmp_path, demo, "cohere-rankings", *options, *lengths, *AT_ONCE)
    assert len(run.values("request_latency")) == NUM_REQUESTS and not run.errors()


def test_a_trace_is_replayed_at_its_times_with_its_lengths_and_shared_blocks(
    tmp_path: Path, demo: str, template_length: int
) -> None:
    block = 32
    rows = [(0, [1, 2], 16), (1000, [1, 2, 3], 12), (2000, [4, 5], 20), (3000, [4, 5], 8)]
    keys = ("timestamp", "hash_ids", "output_length", "input_length")
    trace = tmp_path / "trace.jsonl"
    lines = [json.dumps(dict(zip(keys, (*row, block * len(row[1])), strict=True))) for row in rows]
    trace.write_text("\n".join(lines))
    run = profile(
        *(tmp_path, demo, "chat", "--streaming", *TO_THE_LIMIT, "--fixed-schedule"),
        *("--input-file", str(trace), "--custom-dataset-type", "mooncake-trace"),
        *("--isl-block-size", str(block)),
    )
    lengths = [block * len(hashes) + template_length for _, hashes, _ in rows]
    assert run.values("input_sequence_length") == lengths
    assert run.values("output_sequence_length") == [num for _, _, num in rows]
    assert run.num_on_server("penstock_generated_tokens") == sum(num for _, _, num in rows)
    run.check_times()
    first, second, third, fourth = run.values("usage_prompt_cache_read_tokens")
    assert second - first >= block and fourth - third >= block
    starts = [request["metadata"]["request_start_ns"] / 1e6 for request in run.requests]
    assert all(after - before > 300 for before, after in pairwise(starts))


def test_cancelled_requests_leave_the_others_whole_at_a_server_with_a_key(
    tmp_path: Path, guarded: str
) -> None:
    run = profile(
        *(tmp_path, guarded, "completions", "--streaming", "--api-key", "secret"),
        *(*REQUESTS, *TO_THE_LIMIT, *AT_ONCE, "--random-seed", "1"),
        *("--request-cancellation-rate", "50", "--request-cancellation-delay", "0"),
    )
    assert set(run.errors()) == {"RequestCancellationError"}
    whole = run.values("output_sequence_length")
    assert whole == [NUM_OUTPUT] * (NUM_REQUESTS - len(run.errors()))
    run.check_times()

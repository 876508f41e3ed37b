"""guidellm's `run`, with synthetic prompts of the model's own tokenizer.

What it requires that others do not: it asks for `continuous_usage_stats`, takes the counts of every
request from the server's usage, and reports what was streamed by them; `ignore_eos` with
`max_completion_tokens` has to give that many tokens exactly; it asks `/health` first, and for the
model's name where it is given none.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_to_end
from tests.support.paths import DEMO_MODEL

NUM_PROMPT, NUM_OUTPUT, NUM_REQUESTS = 64, 16, 6
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def benchmarks(
    folder: Path, server: str, request_format: str, profile: str, key: str = "none"
) -> list[dict[str, Any]]:
    """What a run reports, which has to succeed."""
    report = folder / "report.json"
    backend = f"kind=openai_http,target={server},request_format={request_format},api_key={key}"
    data = f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_OUTPUT}"
    options = {
        "--backend": backend,
        "--tokenizer": f"kind=huggingface_auto,model={DEMO_MODEL}",
        "--data": data,
        "--profile": profile,
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--output": f"kind=json,path={report}",
    }
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
        *(part for option in options.items() for part in option),
    ]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run_to_end(command, folder=folder, env=env, timeout_s=200)
    found: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"]
    return found


@pytest.mark.parametrize(
    ("request_format", "profile"),
    [
        (CHAT, "kind=concurrent,streams=2"),
        (TEXT, "kind=throughput,max_concurrency=4"),
        (RESPONSES, "kind=constant,rate=10"),
    ],
    ids=["chat", "text", "responses"],
)
def test_every_request_succeeds_with_the_tokens_that_were_asked_for(
    tmp_path: Path, demo: str, template_length: int, request_format: str, profile: str
) -> None:
    (found,) = benchmarks(tmp_path, demo, request_format, profile)
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    num_prompt = NUM_PROMPT + (0 if request_format == TEXT else template_length)
    for request in found["requests"]["successful"]:
        counts = request["prompt_tokens"], request["output_tokens"]
        assert counts == (num_prompt, NUM_OUTPUT)
        assert 0 < request["time_to_first_token_ms"] <= request["request_latency"] * 1000


def test_embeddings_are_benchmarked_by_the_tokens_of_their_inputs(
    tmp_path: Path, demo: str
) -> None:
    (found,) = benchmarks(tmp_path, demo, "/v1/embeddings", "kind=synchronous")
    requests = found["requests"]["successful"]
    assert not found["requests"]["errored"]
    assert [request["prompt_tokens"] for request in requests] == [NUM_PROMPT] * NUM_REQUESTS


def test_a_sweep_runs_every_rate_against_a_server_with_a_key(tmp_path: Path, guarded: str) -> None:
    found = benchmarks(tmp_path, guarded, CHAT, "kind=sweep,sweep_size=4", key="secret")
    assert len(found) == 4
    for benchmark in found:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] == NUM_REQUESTS and not totals["errored"]

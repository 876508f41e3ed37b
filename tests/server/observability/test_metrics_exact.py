"""One request of each kind at a time, and by how much it must increase each metric."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.scraping import Scrape
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

OUTCOMES = ("stop", "length", "abandoned", "failed")
# Each answer adds one observation to each; metrics that a test does not mention must not change.
PER_ANSWER = (
    "time_to_first_token_seconds",
    "prefill_time_seconds",
    "decode_time_seconds",
    "inference_time_seconds",
    "request_generated_tokens",
)
COUNTED = (
    *PER_ANSWER,
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "queue_time_seconds",
    "request_latency_seconds",
    "request_prompt_tokens",
    "request_computed_prompt_tokens",
    "request_answers",
    "request_max_tokens",
)
SUMMED = ("request_generated_tokens", "request_prompt_tokens", "request_max_tokens")
TOTALS = ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "preemptions")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ("--max-num-seqs", "4", "--max-num-queued-reqs", "8", "--metrics-alias", "vllm")
    with running_server("--scripted-step-ms", "1", *flags) as server:
        yield server


def _increases(server: RunningServer, work: Callable[[], object]) -> dict[str, float]:
    """Every metric that `work` increases, except sums of seconds."""
    before = Scrape.of(server)
    work()
    server.wait_until_idle()
    after = Scrape.of(server)
    found = {name: after(f"{name}_count") - before(f"{name}_count") for name in COUNTED}
    found |= {f"{n}_sum": after(f"{n}_sum") - before(f"{n}_sum") for n in SUMMED}
    found |= {name: after(f"{name}_total") - before(f"{name}_total") for name in TOTALS}
    for outcome in OUTCOMES:
        labels = {"outcome": outcome}
        grew = after("requests_total", **labels) - before("requests_total", **labels)
        found[outcome] = grew
    return {name: value for name, value in found.items() if value}


def _answers(
    *, prompts: int, prompt_tokens: int, n: int, tokens: int, max_tokens: int
) -> dict[str, float]:
    """The increases by `n` answers of `tokens` tokens to each prompt, without prefix hits."""
    answers = prompts * n
    return dict.fromkeys(PER_ANSWER, float(answers)) | {
        "time_per_output_token_seconds": answers,
        "inter_token_latency_seconds": answers * (tokens - 1),
        "queue_time_seconds": answers,
        "request_latency_seconds": 1,
        "request_prompt_tokens": prompts,
        "request_prompt_tokens_sum": prompts * prompt_tokens,
        "request_computed_prompt_tokens": prompts,
        "request_answers": prompts,
        "request_max_tokens": prompts,
        "request_max_tokens_sum": prompts * max_tokens,
        "request_generated_tokens_sum": answers * tokens,
        "prompt_tokens": prompts * prompt_tokens,
        "generated_tokens": answers * tokens,
        "length": 1,
    }


def _ids(first: int, count: int) -> list[int]:
    return [3 + (first + i) % 200 for i in range(count)]


def _stream(server: RunningServer, body: dict[str, Any]) -> None:
    url, body = server.url + "/v1/completions", {"model": MODEL, "stream": True} | body
    with httpx.stream("POST", url, json=body, timeout=30) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_a_refused_request_is_not_counted_as_accepted(server: RunningServer) -> None:
    def refused() -> None:
        assert server.complete(prompt=1.5).status_code == 400
        assert server.complete(model="another").status_code == 404
        assert server.complete(prompt=_ids(0, 100), max_tokens=10**6).status_code == 400
        assert server.post("/v1/embeddings", {"model": MODEL, "input": []}).status_code == 400

    responses = Scrape.of(server)("http_responses_total", status="400")
    assert _increases(server, refused) == {}
    assert Scrape.of(server)("http_responses_total", status="400") == responses + 3


def test_best_of_counts_the_answers_that_are_not_returned_too(server: RunningServer) -> None:
    def send() -> None:
        fields = {"n": 2, "best_of": 4, "max_tokens": 5, "ignore_eos": True}
        assert server.complete(prompt=_ids(10, 3), **fields).status_code == 200

    assert _increases(server, send) == _answers(
        prompts=1, prompt_tokens=3, n=4, tokens=5, max_tokens=5
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_prompts_are_one_request_with_an_answer_each(
    server: RunningServer, is_streamed: bool
) -> None:
    body = {"prompt": [_ids(20, 4), _ids(30, 4), _ids(40, 4)], "max_tokens": 7}
    body |= {"ignore_eos": True, "n": 2}
    send = (lambda: _stream(server, body)) if is_streamed else (lambda: server.complete(**body))
    assert _increases(server, send) == _answers(
        prompts=3, prompt_tokens=4, n=2, tokens=7, max_tokens=7
    )


def test_the_steps_of_vllms_metric_add_up_to_the_prompt_and_the_answer(
    server: RunningServer,
) -> None:
    """The last token of an answer too, which no step reads."""
    name = "vllm:iteration_tokens_total_sum"
    labels = {"model_name": MODEL, "engine": "0"}
    before = Scrape.of(server).full(name, **labels)
    server.complete(prompt=_ids(70, 9), max_tokens=5, ignore_eos=True)
    server.wait_until_idle()
    assert Scrape.of(server).full(name, **labels) - before == 9 + 5


def test_an_answer_that_was_not_preempted_is_counted_as_that(server: RunningServer) -> None:
    before = Scrape.of(server).buckets("penstock_request_preemptions")
    server.complete(prompt=_ids(80, 4), max_tokens=3, n=2, ignore_eos=True)
    server.wait_until_idle()
    after = Scrape.of(server).buckets("penstock_request_preemptions")
    assert after[0.0] - before[0.0] == 2


def test_an_answer_of_one_token_has_no_time_per_output_token(server: RunningServer) -> None:
    grown = _increases(server, lambda: server.complete(prompt=_ids(50, 4), max_tokens=1))
    expected = _answers(prompts=1, prompt_tokens=4, n=1, tokens=1, max_tokens=1)
    del expected["time_per_output_token_seconds"], expected["inter_token_latency_seconds"]
    grown["length"] = grown.pop("stop", 0) + grown.get("length", 0)
    assert grown == expected


def test_a_prompt_without_an_answer_has_no_first_token(server: RunningServer) -> None:
    def send() -> None:
        response = server.complete(prompt=_ids(60, 4), max_tokens=0, echo=True, logprobs=1)
        assert response.status_code == 200

    assert _increases(server, send) == {
        "queue_time_seconds": 1,
        "request_latency_seconds": 1,
        "request_prompt_tokens": 1,
        "request_prompt_tokens_sum": 4,
        "request_computed_prompt_tokens": 1,
        "request_answers": 1,
        "request_max_tokens": 1,
        "prompt_tokens": 4,
        "length": 1,
    }


def test_embeddings_are_prompts_and_no_answers(server: RunningServer) -> None:
    body = {"model": MODEL, "input": [_ids(70, 4), _ids(80, 4), _ids(90, 4)]}
    assert _increases(server, lambda: server.post("/v1/embeddings", body)) == {
        "queue_time_seconds": 3,
        "request_latency_seconds": 1,
        "request_prompt_tokens": 3,
        "request_prompt_tokens_sum": 12,
        "request_computed_prompt_tokens": 3,
        "prompt_tokens": 12,
        "stop": 1,
    }


def test_prompts_count_only_if_all_prompts_of_the_request_are_accepted(
    server: RunningServer,
) -> None:
    prompts = [_ids(130, 3), _ids(140, 3)]
    hog = {"model": MODEL, "prompt": prompts, "max_tokens": 50_000, "n": 4, "stream": True}
    before = Scrape.of(server)("requests_total", outcome="abandoned")

    def send() -> None:
        url = server.url + "/v1/completions"
        with httpx.stream("POST", url, json=hog | {"ignore_eos": True}) as response:
            assert response.status_code == 200
            lines = response.iter_lines()  # the connection closes if this is garbage-collected
            next(lines)
            # The queue has room for four of them.
            body = {"model": MODEL, "input": [_ids(first, 4) for first in range(8)]}
            assert server.post("/v1/embeddings", body).status_code == 429
        wait_until(lambda: Scrape.of(server)("requests_total", outcome="abandoned") > before)

    grown = _increases(server, send)
    assert grown["prompt_tokens"] == grown["request_prompt_tokens_sum"] == 6
    assert grown["request_prompt_tokens"] == 2 and grown["abandoned"] == 1


def test_tokens_after_a_stop_string_are_not_counted_as_generated_by_the_answer(
    server: RunningServer,
) -> None:
    fields = {"prompt": _ids(100, 4), "max_tokens": 60, "ignore_eos": True}
    text = server.complete(**fields).json()["choices"][0]["text"]
    usages = []

    def send() -> None:
        answer = server.complete(**fields, stop=[text[8:12]]).json()
        usages.append(answer["usage"]["completion_tokens"])

    grown = _increases(server, send)
    (num_returned,) = usages
    assert 1 < num_returned < 60
    sampled = grown.pop("generated_tokens")
    expected = _answers(prompts=1, prompt_tokens=4, n=1, tokens=num_returned, max_tokens=60)
    del expected["generated_tokens"], expected["length"]
    assert grown == expected | {"stop": 1}
    assert num_returned <= sampled < 60  # and the tokens sampled before the abort


def test_a_stream_whose_client_disconnects_counts_the_tokens_so_far(server: RunningServer) -> None:
    before = Scrape.of(server)("requests_total", outcome="abandoned")

    def disconnect() -> None:
        body = {"model": MODEL, "prompt": _ids(110, 4), "max_tokens": 50_000, "stream": True}
        url = server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body | {"ignore_eos": True}) as response:
            lines = response.iter_lines()
            for _ in range(20):
                next(lines)
        wait_until(lambda: Scrape.of(server)("requests_total", outcome="abandoned") > before)

    grown = _increases(server, disconnect)
    generated, gaps = grown.pop("generated_tokens"), grown.pop("inter_token_latency_seconds")
    assert generated >= gaps + 1 >= 8
    assert grown == {
        "time_to_first_token_seconds": 1,
        "prefill_time_seconds": 1,
        "queue_time_seconds": 1,
        "request_prompt_tokens": 1,
        "request_prompt_tokens_sum": 4,
        "request_computed_prompt_tokens": 1,
        "request_answers": 1,
        "request_max_tokens": 1,
        "request_max_tokens_sum": 50_000,
        "prompt_tokens": 4,
        "abandoned": 1,
    }


def test_a_structured_answer_is_counted_as_in_its_usage(server: RunningServer) -> None:
    usages = []

    def send() -> None:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        answer = server.chat(
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        )
        usages.append(answer.json()["usage"])

    grown = _increases(server, send)
    (usage,) = usages
    tokens, prompt = usage["completion_tokens"], usage["prompt_tokens"]
    assert grown["generated_tokens"] == grown["request_generated_tokens_sum"] == tokens
    assert grown["inter_token_latency_seconds"] == tokens - 1
    assert grown["prompt_tokens"] == grown["request_prompt_tokens_sum"] == prompt
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert grown.get("cached_prompt_tokens", 0) == cached


def test_vllms_metrics_with_other_labels_add_up_to_ours(server: RunningServer) -> None:
    before = Scrape.of(server)
    prompt = _ids(120, 40)
    for _ in range(2):
        assert server.complete(prompt=prompt).status_code == 200
    server.post("/v1/completions", {"model": "another"})
    server.get("/v1/nowhere")
    after, labels = Scrape.of(server), {"model_name": MODEL, "engine": "0"}

    def grew(name: str, **more: str) -> float:
        return after.full(name, **more) - before.full(name, **more)

    by_source = "vllm:prompt_tokens_by_source_total"
    assert grew(by_source, source="local_cache_hit", **labels) == 32
    assert grew(by_source, source="local_compute", **labels) == 80 - 32
    here = {"handler": "/v1/completions", "method": "POST"}
    assert grew("http_requests_total", status="2xx", **here) == 2
    assert grew("http_requests_total", status="4xx", **here) == 1
    assert grew("http_requests_total", handler="none", method="GET", status="4xx") == 1
    blocks = sum(after(f"kv_{name}_blocks") for name in ("used", "idle", "free"))
    sizes = {"block_size": "16", "num_gpu_blocks": str(int(blocks))}
    assert after.full("vllm:cache_config_info", **labels, **sizes) == 1


def test_memory_and_cpu_of_the_engine_process_are_exported(server: RunningServer) -> None:
    scrape = Scrape.of(server)
    assert scrape("engine_process_resident_memory_bytes") > 1e6
    assert scrape("engine_process_cpu_seconds_total") > 0
    assert scrape("engine_process_start_time_seconds") >= scrape.full("process_start_time_seconds")

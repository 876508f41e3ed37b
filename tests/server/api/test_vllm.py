"""Fields and routes of vLLM: those that are served, and those that are refused by name."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
WHO = [{"role": "user", "content": "Who are you?"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": WHO},
    COMPLETIONS: {"prompt": "Once"},
    RESPONSES: {"input": "Once"},
}


@pytest.fixture(scope="module")
def server(demo_server: RunningServer) -> RunningServer:
    return demo_server


def answer(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def refusal(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_minus_one_logprobs_are_the_most_that_are_served(server: RunningServer) -> None:
    fields: dict[str, Any] = {"messages": WHO, "max_tokens": 2, "temperature": 0, "logprobs": True}
    most, twenty = (answer(server, CHAT, top_logprobs=n, **fields) for n in (-1, 20))
    logprobs = most["choices"][0]["logprobs"]
    assert logprobs == twenty["choices"][0]["logprobs"]
    assert [len(token["top_logprobs"]) for token in logprobs["content"]] == [20, 20]
    story: dict[str, Any] = {"prompt": "Once", "max_tokens": 1, "temperature": 0, "echo": True}
    most, twenty = (answer(server, COMPLETIONS, logprobs=n, **story) for n in (-1, 20))
    assert most["choices"][0]["logprobs"] == twenty["choices"][0]["logprobs"]


def test_minus_one_top_logprobs_need_logprobs(server: RunningServer) -> None:
    assert refusal(server, CHAT, messages=WHO, top_logprobs=-1)["param"] == "top_logprobs"
    assert refusal(server, CHAT, messages=WHO, logprobs=True, top_logprobs=-2)


def test_every_wrong_key_of_logit_bias_is_named(server: RunningServer) -> None:
    bias = {"5": 1, "abc": 1, "6.5": 1, "": 2}
    error = refusal(server, COMPLETIONS, prompt="Once", logit_bias=bias)
    assert error["message"] == (
        "logit_bias has the keys 'abc', '6.5', ''; its keys must be token ids"
    )
    many = {str(10**6 + i): 1 for i in range(20)} | {"5": 1}
    error = refusal(server, COMPLETIONS, prompt="Once", logit_bias=many)
    assert "1000000, 1000001, " in error["message"] and "and 4 more; this" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value", "instead"),
    [
        (COMPLETIONS, "logprob_token_ids", [1], "top_logprobs"),
        (CHAT, "logprob_token_ids", [1], "top_logprobs"),
        (COMPLETIONS, "use_beam_search", True, "best_of"),
        (CHAT, "kv_transfer_params", {"do_remote_prefill": True}, "itself"),
        (RESPONSES, "background", True, "keep the connection open or stream"),
    ],
)
def test_a_refused_field_comes_with_what_to_use_instead(
    server: RunningServer, path: str, field: str, value: Any, instead: str
) -> None:
    error = refusal(server, path, **LEAST[path], **{field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert instead in error["message"]


def test_the_last_chunk_of_a_chat_ends_it_without_content_as_at_openai(
    server: RunningServer,
) -> None:
    events = server.post(CHAT, {"messages": WHO, "max_tokens": 4, "stream": True}).text
    *_, end, done = events.rstrip().split("\n\n")
    assert done == "data: [DONE]"
    last = json.loads(end.removeprefix("data: "))["choices"][0]
    assert last["delta"] == {} and last["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_request_that_asks_for_the_load_gets_it_in_a_header(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    def report(form: str) -> Any:
        body = {"messages": WHO, "max_tokens": 1, **fields}
        response = server.post(CHAT, body, headers={"endpoint-load-metrics-format": form})
        assert response.status_code == 200
        return response.headers.get("endpoint-load-metrics")

    text = report("TEXT") or ""
    pairs = dict(pair.split("=") for pair in text.removeprefix("TEXT ").split(", "))
    assert 0 <= float(pairs["named_metrics.kv_cache_usage_perc"]) <= 1
    assert float(pairs["named_metrics.num_requests_waiting"]) >= 0
    load = json.loads((report("json") or "").removeprefix("JSON "))["named_metrics"]
    assert set(load) == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert report("BIN") is None
    assert "endpoint-load-metrics" not in server.chat(max_tokens=1).headers


def test_load_counts_answers_that_have_not_ended(scripted_server: RunningServer) -> None:
    scripted_server.wait_until_idle()
    assert scripted_server.get("/load").json() == {"server_load": 0}
    endless = {"prompt": "Once", "max_tokens": 50_000, "ignore_eos": True, "stream": True, "n": 2}
    url = scripted_server.url + COMPLETIONS
    with httpx.stream("POST", url, json=endless, timeout=30) as response:
        lines = response.iter_lines()  # kept: the connection closes when an iterator is freed
        next(lines)
        assert scripted_server.get("/load").json() == {"server_load": 2}
    wait_until(lambda: scripted_server.get("/load").json() == {"server_load": 0})


def test_tokenizer_info_is_the_models_own_with_its_template(server: RunningServer) -> None:
    info = server.get("/tokenizer_info").json()
    own = json.loads((ROOT / "engine/hub/demo_model/tokenizer_config.json").read_text())
    assert info["tokenizer_class"] and info["eos_token"] == own["eos_token"]
    assert info["chat_template"] == server.get("/props").json()["chat_template"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": WHO, "max_tokens": 4, "temperature": 0}),
        (COMPLETIONS, {"prompt": "Once", "max_tokens": 1, "temperature": 0, "stream": True}),
        ("/v1/embeddings", {"input": "Once"}),
        ("/rerank", {"query": "Once", "documents": ["upon", "a time"]}),
        ("/score", {"text_1": "Once", "text_2": "upon"}),
        ("/score", {"queries": "Once", "documents": ["upon"]}),
    ],
)
def test_invocations_answer_as_the_route_of_their_fields(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    def shown(path: str) -> str:
        response = server.post(path, fields)
        assert response.status_code == 200, response.text
        text = re.sub(r'"(id|created)":("[^"]*"|\d+)', "", response.text)
        return re.sub(r"\d\.\d+(e-\d+)?", lambda n: f"{float(n[0]):.3f}", text)

    assert shown("/invocations") == shown(path)


def test_invocations_of_no_known_kind_are_refused(server: RunningServer) -> None:
    assert "messages, prompt, input" in refusal(server, "/invocations", model=MODEL)["message"]
    assert refusal(server, "/invocations", messages=7)["param"] == "messages"
    assert server.post("/invocations", [1]).json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/inference/v1/generate", "return_token_ids"),
        ("/v1/chat/completions/batch", "send each to /v1/chat/completions"),
        ("/v1/completions/render", "/tokenize"),
        ("/pooling", "/v1/embeddings"),
    ],
)
def test_a_path_of_vllm_that_is_not_served_says_what_to_use(
    server: RunningServer, path: str, instead: str
) -> None:
    response = server.post(path, {"token_ids": [1]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert instead in error["message"]

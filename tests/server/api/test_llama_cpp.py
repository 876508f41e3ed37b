"""`/completion`, `/props`, `n_predict` and `timings`: as llama.cpp's clients use them."""

import json
from typing import Any

import pytest

from tests.support.serving import RunningServer

Json = dict[str, Any]
STORY: Json = {"prompt": "Once upon a time", "temperature": 0}


@pytest.fixture(scope="module")
def server(demo_server: RunningServer) -> RunningServer:
    return demo_server


@pytest.fixture(scope="module")
def context(server: RunningServer) -> int:
    return int(server.get("/props").json()["default_generation_settings"]["n_ctx"])


def num_tokens(server: RunningServer, prompt: str) -> int:
    return int(server.post("/tokenize", {"prompt": prompt}).json()["count"])


def answer(server: RunningServer, **fields: Any) -> Any:
    response = server.post("/completion", {**STORY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: RunningServer, path: str, fields: Json) -> list[Json]:
    lines = server.post(path, {**fields, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def completion(server: RunningServer, **fields: Any) -> Json:
    body: Json = server.post("/v1/completions", {**STORY, **fields}).json()
    return body


def test_an_answer_is_that_of_v1_completions_in_llama_cpps_shape(server: RunningServer) -> None:
    body = answer(server, n_predict=12, return_tokens=True)
    same = completion(server, max_tokens=12, return_token_ids=True)["choices"][0]
    assert (body["content"], body["tokens"]) == (same["text"], same["token_ids"])
    assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "limit", "")
    assert body["tokens_predicted"] == 12
    assert body["tokens_evaluated"] == num_tokens(server, STORY["prompt"])
    assert body["prompt"] == STORY["prompt"]
    assert body["generation_settings"]["n_predict"] == 12


def test_the_events_add_up_to_the_answer_and_the_last_has_the_rest(server: RunningServer) -> None:
    body = answer(server, n_predict=12, return_tokens=True)
    *parts, last = events(server, "/completion", {**STORY, "n_predict": 12})
    assert parts
    assert not any(part["stop"] for part in parts)
    assert "".join(part["content"] for part in parts) == body["content"]
    assert [i for part in parts for i in part["tokens"]] == body["tokens"]
    assert parts[-1]["tokens_predicted"] == 12
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "limit")
    assert last["timings"]["predicted_n"] == 12


@pytest.mark.parametrize(
    ("prompt", "fields", "num"),
    [
        (["Once upon", "A dog"], {}, 2),
        ([[40, 41], [40, 41]], {}, 2),
        ([40, 41, 42], {}, 1),
        ("Once", {"n_cmpl": 3}, 3),
    ],
)
def test_several_prompts_have_a_list_of_answers_and_ids_have_their_text(
    server: RunningServer, prompt: Any, fields: Json, num: int
) -> None:
    bodies = answer(server, prompt=prompt, n_predict=2, **fields)
    bodies = [bodies] if num == 1 else bodies
    assert [body["index"] for body in bodies] == list(range(num))
    assert all(isinstance(body["prompt"], str) and body["prompt"] for body in bodies)


def test_without_a_limit_an_answer_may_fill_the_context(
    server: RunningServer, context: int
) -> None:
    prompt = [40] * (context - 30)
    for fields in ({}, {"n_predict": -1}, {"n_predict": 10**6}):
        body = answer(server, prompt=prompt, ignore_eos=True, **fields)
        assert body["tokens_predicted"] == 30
    usage = completion(server, prompt=prompt, n_predict=-1, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == context


def test_a_word_that_ended_the_answer_is_named(server: RunningServer) -> None:
    word = answer(server, n_predict=12)["content"].split()[3]
    body = answer(server, n_predict=12, stop=[word])
    assert (body["stop_type"], body["stopping_word"]) == ("word", word)
    assert word not in body["content"]


def test_probabilities_are_those_of_v1_completions(server: RunningServer) -> None:
    tokens = answer(server, n_predict=4, n_probs=3)["completion_probabilities"]
    logprobs = completion(server, max_tokens=4, logprobs=3)["choices"][0]["logprobs"]
    assert [token["token"] for token in tokens] == logprobs["tokens"]
    assert [token["logprob"] for token in tokens] == logprobs["token_logprobs"]
    for token in tokens:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert [best["logprob"] for best in token["top_logprobs"]] == sorted(
            (best["logprob"] for best in token["top_logprobs"]), reverse=True
        )


def test_a_token_whose_bias_is_false_does_not_come(server: RunningServer) -> None:
    comma = answer(server, n_predict=1, return_tokens=True)["tokens"]
    banned = answer(server, n_predict=1, return_tokens=True, logit_bias=[[comma[0], False]])
    assert banned["tokens"] != comma
    wrong = server.post("/completion", {**STORY, "logit_bias": [["a word", -1.0]]})
    assert wrong.json()["error"]["param"] == "logit_bias"


def test_samplers_that_are_off_pass_and_others_are_refused_by_name(server: RunningServer) -> None:
    response = server.post("/completion", {**STORY, "mirostat": 0, "samplers": ["top_k"]})
    assert response.headers["x-ignored-fields"] == "samplers"
    error = server.post("/completion", {**STORY, "mirostat": 2}).json()["error"]
    assert (error["param"], error["code"]) == ("mirostat", "unsupported_parameter")
    error = server.post("/completion", {**STORY, "n_predict": -2}).json()["error"]
    assert error["param"] == "n_predict"


def test_a_prompt_that_is_too_long_has_llama_cpps_error(
    server: RunningServer, context: int
) -> None:
    too_long = "Once upon a time " * (context // 4)
    response = server.post("/completion", {"prompt": too_long})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert error["n_ctx"] == context
    assert error["n_prompt_tokens"] == num_tokens(server, too_long)
    there = server.post("/v1/completions", {"prompt": too_long}).json()["error"]
    of_openai = {"message": error["message"], "param": "prompt", "code": error["code"]}
    assert there == {**of_openai, "type": "invalid_request_error"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/completion", {"n_predict": 8}), ("/v1/completions", {"max_tokens": 8})],
)
def test_timings_are_plausible_and_the_same_stream_has_them_at_its_end(
    server: RunningServer, path: str, fields: Json
) -> None:
    sent = {**STORY, **fields, "ignore_eos": True, "timings_per_token": True}
    server.post(path, sent)
    times = server.post(path, sent).json()["timings"]
    assert times["cache_n"] + times["prompt_n"] == num_tokens(server, STORY["prompt"])
    assert times["predicted_n"] == 8
    assert times["prompt_ms"] > 0
    # Tokens that were received together took no time.
    product = times["predicted_per_second"] * times["predicted_per_token_ms"]
    assert product == (pytest.approx(1e3) if times["predicted_ms"] else 0)
    assert events(server, path, sent)[-1]["timings"].keys() == times.keys()


def test_an_answer_without_tokens_took_no_time(server: RunningServer) -> None:
    body = answer(server, n_predict=0)
    assert (body["content"], body["timings"]["prompt_ms"]) == ("", 0)


def test_v1_completions_have_timings_only_where_they_are_asked_for(server: RunningServer) -> None:
    assert "timings" not in completion(server, max_tokens=2)


def test_props_say_how_long_the_context_is(server: RunningServer, context: int) -> None:
    card = server.get("/v1/models").json()["data"][0]
    assert context == card["max_model_len"]
    assert server.get("/props").json()["model_alias"] == card["id"]

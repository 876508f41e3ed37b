"""Every field beyond the first ones has an effect that can be seen, on the demo model."""

import json
import string
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer, running_server

TOKENIZER = Tokenizer.from_file(str(ROOT / "engine" / "hub" / "demo_model" / "tokenizer.json"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(demo_server: RunningServer) -> RunningServer:
    return demo_server


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """A greedy completion's body."""
    response = server.complete(temperature=0, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def text_of(server: RunningServer, **fields: Any) -> str:
    return str(complete(server, **fields)["choices"][0]["text"])


def chunks_of(server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    prompt = {"prompt": "Once"} if path == COMPLETIONS else {"messages": [USER]}
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, "stream": True, **prompt, **fields}
    events = server.post(path, body).text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


USER = {"role": "user", "content": "Who are you?"}


def test_min_tokens_postpones_the_end(server: RunningServer) -> None:
    short = server.chat(max_tokens=200, temperature=0).json()
    assert short["choices"][0]["finish_reason"] == "stop"
    num_short = short["usage"]["completion_tokens"]
    longer = server.chat(max_tokens=200, temperature=0, min_tokens=num_short + 5).json()
    assert longer["usage"]["completion_tokens"] > num_short + 5
    content = short["choices"][0]["message"]["content"]
    assert longer["choices"][0]["message"]["content"].startswith(content)


def test_a_stop_string_within_min_tokens_does_not_stop(server: RunningServer) -> None:
    whole = text_of(server, max_tokens=30)
    stop = whole[3:6]
    assert text_of(server, max_tokens=30, stop=stop) == whole[: whole.index(stop)]
    assert text_of(server, max_tokens=30, stop=stop, min_tokens=20).startswith(whole[:6])


def test_min_tokens_beyond_max_tokens_are_refused(server: RunningServer) -> None:
    assert refusal(server.complete(max_tokens=3, min_tokens=4))["param"] == "min_tokens"


def test_a_bad_word_is_never_generated_anywhere_in_the_text(server: RunningServer) -> None:
    text = text_of(server, prompt="Once upon a time", max_tokens=40)
    words = [word for word in text.split() if word.isalpha()]
    word = max(words, key=len)
    other = text_of(server, prompt="Once upon a time", max_tokens=40, bad_words=[word])
    assert f" {word} " not in other and other != text


def test_a_bad_word_of_many_tokens_forbids_only_its_last_after_the_others(
    server: RunningServer,
) -> None:
    text = text_of(server, prompt="Once upon a time", max_tokens=40)
    first, second, third = text.split()[4:7]
    phrase = f"{first} {second} {third}"
    assert len(TOKENIZER.encode(phrase).ids) > 2
    other = text_of(server, prompt="Once upon a time", max_tokens=40, bad_words=[phrase])
    assert phrase not in other
    assert f"{first} {second}" in other


def test_only_allowed_token_ids_are_sampled(server: RunningServer) -> None:
    allowed = TOKENIZER.encode(" the cat sat").ids
    body = complete(server, allowed_token_ids=allowed, return_token_ids=True)
    assert set(body["choices"][0]["token_ids"]) <= set(allowed)


@pytest.mark.parametrize("ids", [[], [10**6]])
def test_allowed_token_ids_must_be_ids_of_the_model(server: RunningServer, ids: list[int]) -> None:
    error = refusal(server.complete(allowed_token_ids=ids))
    assert error["param"] == "allowed_token_ids"


def test_echo_puts_the_prompt_before_each_answer(server: RunningServer) -> None:
    prompts = ["Once upon a time", "The cat"]
    plain = complete(server, prompt=prompts)["choices"]
    echoed = complete(server, prompt=prompts, echo=True)["choices"]
    for prompt, before, after in zip(prompts, plain, echoed, strict=True):
        assert after["text"] == prompt + before["text"]
    ids = TOKENIZER.encode(prompts[0]).ids
    assert text_of(server, prompt=ids, echo=True) == echoed[0]["text"]


def test_a_stream_echoes_the_prompt_in_its_first_chunk(server: RunningServer) -> None:
    chunks = chunks_of(server, COMPLETIONS, echo=True)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[0].startswith("Once") and "".join(texts) == text_of(
        server, echo=True, max_tokens=6
    )


def test_best_of_keeps_the_likeliest_of_the_answers(server: RunningServer) -> None:
    fields = {"temperature": 1.2, "seed": 11, "max_tokens": 12}
    every = server.complete(n=6, logprobs=0, **fields).json()["choices"]

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    ranked = sorted(every, key=mean, reverse=True)
    body = server.complete(n=2, best_of=6, **fields).json()
    assert [c["text"] for c in body["choices"]] == [c["text"] for c in ranked[:2]]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] > 12 * 3  # all six were made


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}])
def test_best_of_below_n_or_streamed_is_refused(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    assert refusal(server.complete(**fields))["param"] == "best_of"


def test_return_token_ids_gives_the_prompts_ids_and_the_answers(server: RunningServer) -> None:
    choice = complete(server, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == TOKENIZER.encode("Once").ids
    assert TOKENIZER.decode(choice["token_ids"]) == choice["text"]
    body = server.chat(return_token_ids=True, max_tokens=200, temperature=0).json()
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["token_ids"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streamed_token_ids_join_to_those_of_the_plain_answer(
    server: RunningServer, path: str
) -> None:
    chunks = chunks_of(server, path, return_token_ids=True)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
    assert len(ids) == 6
    prompts = [c.get("prompt_token_ids") or c["choices"][0].get("prompt_token_ids") for c in chunks]
    assert prompts[0] and prompts[1:] == [None] * (len(chunks) - 1)


def test_return_tokens_as_token_ids_names_tokens_by_id(server: RunningServer) -> None:
    body = complete(server, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = body["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    entry = server.chat(**fields).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["token"].startswith("token_id:")
    assert entry["top_logprobs"][0]["token"].startswith("token_id:")


def test_skip_special_tokens_false_shows_them_by_name(server: RunningServer) -> None:
    fields = {"include_stop_str_in_output": True, "max_tokens": 200, "temperature": 0}
    hidden = server.chat(**fields).json()["choices"][0]["message"]["content"]
    shown = server.chat(skip_special_tokens=False, **fields).json()["choices"][0]
    assert shown["finish_reason"] == "stop"
    assert shown["message"]["content"].startswith(hidden)
    assert shown["message"]["content"].removeprefix(hidden).startswith("<")


@pytest.mark.parametrize("value", [True, False])
def test_no_spaces_come_between_special_tokens_either_way(
    server: RunningServer, value: bool
) -> None:
    fields = {"skip_special_tokens": False, "max_tokens": 20}
    same = text_of(server, spaces_between_special_tokens=value, **fields)
    assert same == text_of(server, **fields)


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(server: RunningServer) -> None:
    ids = TOKENIZER.encode("Once upon a time there was a cat").ids
    body = complete(server, prompt=ids, truncate_prompt_tokens=3, return_token_ids=True)
    assert body["choices"][0]["prompt_token_ids"] == ids[-3:]
    assert body["usage"]["prompt_tokens"] == 3
    echoed = text_of(server, prompt="Once upon a time", truncate_prompt_tokens=1, echo=True)
    assert not echoed.startswith("Once")


def test_truncate_prompt_tokens_minus_one_keeps_what_fits(server: RunningServer) -> None:
    limit = server.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    ids = [50] * (limit + 10)
    assert refusal(server.complete(prompt=ids))["code"] == "context_length_exceeded"
    body = complete(server, prompt=ids, truncate_prompt_tokens=-1, max_tokens=5)
    assert body["usage"]["prompt_tokens"] == limit - 5
    assert refusal(server.complete(truncate_prompt_tokens=0))["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(("path", "kind"), [(COMPLETIONS, "cmpl"), (CHAT, "chatcmpl")])
def test_a_request_id_names_the_answer_and_two_may_bear_the_same(
    server: RunningServer, path: str, kind: str
) -> None:
    chunks = chunks_of(server, path, request_id="mine-7")
    assert {chunk["id"] for chunk in chunks} == {f"{kind}-mine-7"}
    assert {chunk["id"] for chunk in chunks_of(server, path, request_id="mine-7")} == {
        f"{kind}-mine-7"
    }


@pytest.mark.parametrize("request_id", ["", "two words", "\n", "x" * 129])
def test_a_request_id_that_no_log_can_hold_is_refused(
    server: RunningServer, request_id: str
) -> None:
    assert refusal(server.complete(request_id=request_id))["param"] == "request_id"


def test_add_special_tokens_false_leaves_the_text_alone(server: RunningServer) -> None:
    text = "Once upon"
    for value in (True, False):
        body = complete(server, prompt=text, add_special_tokens=value, return_token_ids=True)
        expected = TOKENIZER.encode(text, add_special_tokens=value).ids
        assert body["choices"][0]["prompt_token_ids"] == expected


def test_continuous_usage_counts_up_to_the_last_chunk(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(server, COMPLETIONS, stream_options=options, max_tokens=200, ignore_eos=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 200
    assert chunks[-1]["choices"] == []


def test_continuous_usage_requires_include_usage(server: RunningServer) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = chunks_of(server, COMPLETIONS, stream_options=options, max_tokens=5, ignore_eos=True)
    assert all("usage" not in chunk for chunk in chunks)


def test_a_completions_last_text_and_its_end_share_a_chunk(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(server, COMPLETIONS, stream_options=options, max_tokens=5, ignore_eos=True)
    last = chunks[-2]["choices"][0]
    assert last["text"] and last["finish_reason"] == "length"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert len(set(counts)) == len(counts) and counts[-1] == 5


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_for_a_providers_accounting_are_accepted_and_change_nothing(
    server: RunningServer, path: str
) -> None:
    accounting = {
        "user": "u1",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    prompt = {"prompt": "Once"} if path == COMPLETIONS else {"messages": [USER]}
    body = {"model": MODEL, "temperature": 0, "max_tokens": 6, **prompt}
    plain, given = (server.post(path, body | fields).json() for fields in ({}, accounting))
    assert plain["choices"] == given["choices"]


@pytest.mark.parametrize("fields", [{"suffix": "end"}, {"use_beam_search": True}])
def test_what_is_not_served_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    error = refusal(server.complete(**fields))
    assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(fields)))


def test_functions_of_a_completion_are_refused_with_the_path_that_serves_them(
    server: RunningServer,
) -> None:
    error = refusal(server.complete(functions=[{"name": "f"}]))
    assert error["param"] == "functions" and "/v1/chat/completions" in error["message"]


def test_two_thousand_prompts_may_share_a_long_list_of_allowed_ids() -> None:
    with running_server("--max-num-queued-reqs", "2048") as server:
        ids = [i % 500 for i in range(1 << 18)]
        answer = server.complete(prompt=["Once"] * 2048, allowed_token_ids=ids, max_tokens=1)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2048


@pytest.mark.parametrize("name", ["bad_words", "banned_strings"])
def test_a_banned_text_is_in_no_answer_however_it_is_divided_into_tokens(
    server: RunningServer, name: str
) -> None:
    plain = text_of(server, prompt="Once upon a time", max_tokens=60)
    # Neither a word nor a token: from the middle of one to the middle of the next.
    text = next(plain[i : i + 6] for i in range(9, 40) if " " in plain[i + 2 : i + 4])
    other = text_of(server, prompt="Once upon a time", max_tokens=60, **{name: [text]})
    assert text in plain
    assert text not in other
    assert other[:9] == plain[:9]
    chunks = chunks_of(
        server, COMPLETIONS, prompt="Once upon a time", max_tokens=60, **{name: [text]}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == other


def test_banned_strings_hold_in_any_case_and_bad_words_in_theirs(server: RunningServer) -> None:
    plain = text_of(server, prompt="Once upon a time", max_tokens=60)
    word = plain.split()[3]
    assert word.islower()
    for name, is_banned in (("bad_words", False), ("banned_strings", True)):
        fields: dict[str, Any] = {name: [word.upper()]}
        other = text_of(server, prompt="Once upon a time", max_tokens=60, **fields)
        assert (word not in other) == is_banned


def test_banned_strings_beside_a_schema_are_refused_by_name(server: RunningServer) -> None:
    fields = {"response_format": {"type": "json_object"}, "banned_strings": ["x"]}
    error = refusal(server.complete(prompt="Once", **fields))
    assert error["param"] == "banned_strings"
    assert "response_format" in error["message"]


def looping(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    """An answer that can only repeat three letters."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 200, "ignore_eos": True, **fields}
    body |= {"structured_outputs": {"regex": "(abc)+"}}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_on_loop": 20},
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 20}},
    ],
)
def test_an_answer_that_repeats_itself_ends_with_length_and_a_reason_in_the_usage(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    answer = looping(server, COMPLETIONS, prompt="Once", **fields)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] == "repetition_detected"
    assert usage["completion_tokens_details"]["repetition_detected"] == 1
    assert usage["completion_tokens"] < 200
    assert 19 <= choice["text"].count("abc") <= 21


def test_every_api_ends_a_loop(server: RunningServer) -> None:
    chat = looping(server, CHAT, messages=[USER], stop_on_loop=True)
    assert chat["choices"][0]["finish_reason"] == "length"
    message = looping(server, "/v1/messages", messages=[USER], stop_on_loop=True)
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["repetition_detected"] == 1
    answer = {"model": MODEL, "input": "Who are you?", "stop_on_loop": True}
    answer |= {"structured_outputs": {"regex": "(abc)+"}, "max_output_tokens": 200}
    response = server.post("/v1/responses", answer | {"temperature": 0}).json()
    assert response["status"] == "incomplete"
    assert response["usage"]["output_tokens_details"]["repetition_detected"] == 1


def test_an_answer_that_does_not_repeat_itself_is_not_touched(server: RunningServer) -> None:
    plain = text_of(server, prompt="Once upon a time", max_tokens=60)
    assert text_of(server, prompt="Once upon a time", max_tokens=60, stop_on_loop=True) == plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
    ],
)
def test_a_rule_of_repetitions_that_means_nothing_is_refused(
    server: RunningServer, fields: dict[str, int], named: str
) -> None:
    error = refusal(server.complete(prompt="Once", repetition_detection=fields))
    assert error["param"] == "repetition_detection"
    assert named in error["message"]


NUMBERS = "a b c d e f g h i j k. " * 4  # which the demo model continues with products


def repeated(server: RunningServer, **fields: Any) -> int:
    """How many tokens of an answer end three that had occurred before."""
    body = {"prompt": NUMBERS, "max_tokens": 40, "return_token_ids": True, **fields}
    choice = complete(server, **body)["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    triples = list(zip(ids, ids[1:], ids[2:], strict=False))
    first = len(choice["prompt_token_ids"]) - 2
    return sum(triples[i] in triples[:i] for i in range(first, len(triples)))


def test_dry_keeps_a_greedy_answer_from_repeating_itself(server: RunningServer) -> None:
    assert repeated(server) > 0
    assert repeated(server, dry_multiplier=0) == repeated(server)
    assert repeated(server, dry_multiplier=100, dry_sequence_breakers=[]) == 0
    assert repeated(server, dry_multiplier=100, dry_penalty_last_n=0) == repeated(server)


def test_what_breakers_end_is_no_repetition_to_dry(server: RunningServer) -> None:
    everywhere = [*string.digits, *string.ascii_letters[:26], *" .,*=\n"]
    dry = {"dry_multiplier": 100, "dry_sequence_breakers": everywhere}
    plain = text_of(server, prompt=NUMBERS, max_tokens=40)
    assert text_of(server, prompt=NUMBERS, max_tokens=40, **dry) == plain


def test_xtc_takes_the_likeliest_choices_away_and_a_seed_fixes_it(server: RunningServer) -> None:
    fields = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 1, "seed": 3}
    xtc = {"xtc_probability": 1, "xtc_threshold": 0.02}
    texts = [server.complete(**fields, **extra).json() for extra in ({}, xtc, xtc)]
    plain, first, second = (answer["choices"][0]["text"] for answer in texts)
    assert first == second
    assert first != plain
    off = server.complete(**fields, xtc_probability=1, xtc_threshold=0.6).json()
    assert off["choices"][0]["text"] == plain

"""Structured output over HTTP with a real model: every answer satisfies its constraint."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from tests.fuzz.many_schemas import bodies, check
from tests.support.compiler import needs_compiler
from tests.support.serving import RunningServer
from tests.support.structured import SCHEMAS, ask_all, assert_validates, json_schema

GBNF = 'root ::= greeting " " name\ngreeting ::= "hello" | "goodbye"\nname ::= [A-Z] [a-z]{2,5}\n'


@pytest.fixture(scope="module", params=["demo", "random"])
def server(request: pytest.FixtureRequest) -> RunningServer:
    running: RunningServer = request.getfixturevalue(f"{request.param}_server")
    return running


@pytest.mark.slow
def test_answers_to_a_sample_of_the_many_schemas_validate(
    server: RunningServer,
) -> None:
    """`make test-schemas` runs all of them."""
    ends = check(server, bodies(seed=3, every=5), concurrency=16)
    assert ends["stop"] >= 0.8 * ends.total(), ends


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    text: str = answer["choices"][index]["message"]["content"]
    return text


@pytest.mark.slow
def test_answers_to_every_schema_validate(server: RunningServer) -> None:
    cases = [(name, seed) for seed in range(5) for name in SCHEMAS]
    bodies = [
        {"response_format": json_schema(SCHEMAS[name]), "seed": seed, "max_tokens": 400}
        for name, seed in cases
    ]
    finishes: Counter[str] = Counter()
    for (name, _), response in zip(cases, ask_all(server, bodies, 32), strict=True):
        assert response.status_code == 200, (name, response.text)
        choice = response.json()["choices"][0]
        finishes[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            assert_validates(choice["message"]["content"], SCHEMAS[name])
    assert finishes["stop"] >= 0.9 * len(cases), finishes


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"regex": "^(yes|no)$"}}, "yes|no"),
        ({"structured_outputs": {"choice": ["red", 'dark "blue"\n', "é"]}}, 'red|dark "blue"\n|é'),
        ({"structured_outputs": {"choice": ["a", "ab", "abc"]}}, "abc|ab|a"),
        ({"structured_outputs": {"grammar": GBNF}}, "(hello|goodbye) [A-Z][a-z]{2,5}"),
        ({"grammar": GBNF}, "(hello|goodbye) [A-Z][a-z]{2,5}"),
        ({"grammar": 'start: "<" /[0-9]+/ ">"'}, "<[0-9]+>"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
        ({"json_schema": {"enum": ["x", 1]}}, '"x"|1'),
    ],
)
def test_each_field_constrains_the_answer(
    server: RunningServer, fields: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        for answer in (
            server.chat(seed=seed, max_tokens=100, **fields),
            server.chat(temperature=0, max_tokens=100, **fields),
        ):
            assert answer.status_code == 200, answer.text
            if answer.json()["choices"][0]["finish_reason"] == "stop":
                assert re.fullmatch(pattern, text_of(answer.json())), text_of(answer.json())


def test_a_trigger_in_free_text_begins_the_content_of_its_tag(server: RunningServer) -> None:
    tag = {"begin": "add(", "schema": SCHEMAS["const"], "end": ")"}
    tags = {"type": "structural_tag", "structures": [tag], "triggers": ["a"]}
    for fields in ({"response_format": tags}, {"structured_outputs": {"structural_tag": tags}}):
        text = text_of(server.chat(seed=5, max_tokens=150, **fields).json())
        before, begin, rest = text.partition("add(")
        assert begin and "a" not in before, text
        assert_validates(rest.partition(")")[0], SCHEMAS["const"])


def test_completions_accept_the_same_fields(server: RunningServer) -> None:
    answer = server.complete(structured_outputs={"choice": ["left", "right"]}).json()
    assert answer["choices"][0]["text"] in ("left", "right")
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        pytest.param({"structured_outputs": {"json_object": True}}, marks=pytest.mark.slow),
    ],
)
def test_a_finished_json_object_is_an_object(server: RunningServer, fields: dict[str, Any]) -> None:
    answers = [server.chat(seed=seed, max_tokens=300, **fields).json() for seed in range(4)]
    ended = [a for a in answers if a["choices"][0]["finish_reason"] == "stop"]
    assert all(isinstance(json.loads(text_of(answer)), dict) for answer in ended)
    assert all(text_of(answer).startswith("{") for answer in answers)


@pytest.mark.parametrize(
    "format_",
    [
        {"type": "json_object", "value": SCHEMAS["const"]},  # huggingface_hub's
        {"type": "json", "value": SCHEMAS["const"]},  # TGI's
        {"type": "json_object", "schema": SCHEMAS["const"], "value": None},  # llama.cpp's
    ],
)
def test_other_servers_ways_to_send_a_schema_are_followed(
    server: RunningServer, format_: dict[str, Any]
) -> None:
    answer = server.chat(response_format=format_, max_tokens=200, model="tgi").json()
    assert_validates(text_of(answer), SCHEMAS["const"])


def test_a_regex_of_tgi_is_followed(server: RunningServer) -> None:
    answer = server.chat(response_format={"type": "regex", "value": "[ab]{4}"}).json()
    assert re.fullmatch("[ab]{4}", text_of(answer))


def test_only_a_strict_schema_is_refused_for_an_unenforceable_keyword(
    server: RunningServer,
) -> None:
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3}
    described: dict[str, Any] = {"name": "unique", "schema": items}
    for strict, status in (({}, 200), ({"strict": False}, 200), ({"strict": True}, 400)):
        format_ = {"type": "json_schema", "json_schema": described | strict}
        answer = server.chat(response_format=format_, max_tokens=60)
        assert answer.status_code == status, answer.text
        if status == 200 and answer.json()["choices"][0]["finish_reason"] == "stop":
            assert_validates(text_of(answer.json()), {**items, "uniqueItems": False})
    assert "uniqueItems at # cannot be enforced" in answer.json()["error"]["message"]


def test_a_text_format_changes_nothing(server: RunningServer) -> None:
    plain = server.chat(seed=4).json()
    assert text_of(server.chat(seed=4, response_format={"type": "text"}).json()) == text_of(plain)


def test_each_of_several_answers_follows_the_grammar_on_its_own(server: RunningServer) -> None:
    schema = SCHEMAS["pattern"]
    answer = server.chat(n=3, temperature=1.5, max_tokens=100, json_schema=schema).json()
    texts = {text_of(answer, i) for i in range(3)}
    assert len(texts) == 3
    for text in texts:
        assert_validates(text, schema)


def test_a_seed_gives_the_same_structured_answer_again(server: RunningServer) -> None:
    body = {"json_schema": SCHEMAS["references"], "seed": 11, "temperature": 1, "max_tokens": 60}
    answers = ask_all(server, [body] * 8, 8)
    assert len({text_of(answer.json()) for answer in answers}) == 1


def test_a_stream_has_the_same_text_as_a_body(server: RunningServer) -> None:
    fields = {"json_schema": SCHEMAS["flat"], "seed": 3, "max_tokens": 60}
    whole = server.chat(**fields).json()
    lines = server.chat(stream=True, **fields).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(deltas) == text_of(whole)
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_logprobs_are_those_of_the_model_without_the_grammar(server: RunningServer) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 1}
    plain = server.chat(**fields).json()["choices"][0]["logprobs"]["content"][0]
    constrained = server.chat(structured_outputs={"regex": "[0-9]{9}"}, **fields).json()
    entry = constrained["choices"][0]["logprobs"]["content"][0]
    assert entry["top_logprobs"] == plain["top_logprobs"]
    assert entry["logprob"] <= plain["logprob"]


def test_a_stop_string_ends_a_structured_answer_early(server: RunningServer) -> None:
    answer = server.chat(structured_outputs={"regex": "aaa;bbb"}, stop=";", max_tokens=20).json()
    assert text_of(answer) == "aaa" and answer["choices"][0]["finish_reason"] == "stop"


def test_a_complete_grammar_ends_the_answer_despite_ignore_eos_and_min_tokens(
    server: RunningServer,
) -> None:
    for fields in ({"ignore_eos": True}, {"min_tokens": 50}):
        answer = server.chat(structured_outputs={"regex": "[ab]{4}"}, max_tokens=60, **fields)
        assert re.fullmatch("[ab]{4}", text_of(answer.json()))
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_ignore_eos_delays_the_end_until_the_grammar_is_complete(server: RunningServer) -> None:
    fields = {"structured_outputs": {"regex": "[ab]{1,40}"}, "max_tokens": 60, "ignore_eos": True}
    answers = [server.chat(seed=seed, temperature=2, **fields).json() for seed in range(4)]
    assert [len(text_of(answer)) for answer in answers] == [40] * 4


def test_fields_that_forbid_all_of_the_grammar_end_the_answer_with_an_error(
    server: RunningServer,
) -> None:
    regex = {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [700]}
    for stream in (False, True):
        answer = server.chat(**regex, stream=stream)
        assert "grammar_failed" in answer.text
    assert server.chat().status_code == 200


@pytest.mark.slow
# Without one, rows are rounded differently in batches of other shapes, and other ids are drawn.
@needs_compiler
@pytest.mark.parametrize("server", ["demo"], indirect=True)
def test_a_preempted_answer_continues_unchanged(server: RunningServer) -> None:
    bodies = [
        {"json_schema": SCHEMAS["formats"], "seed": seed, "max_tokens": 90, "temperature": 1}
        for seed in range(12)
    ]
    undisturbed = [text_of(answer.json()) for answer in ask_all(server, bodies, 1)]
    small = RunningServer("--kv-cache-memory-bytes", "800000", "--max-model-len", "256")
    try:
        small.wait_until_ready()
        answers = [text_of(answer.json()) for answer in ask_all(small, bodies, 12)]
        assert small.metric("preemptions_total") > 0
        assert answers == undisturbed
    finally:
        small.stop()

"""A server whose steps have drafts answers what one without answers, and counts them."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiler import needs_compiler
from tests.support.paths import DEMO_MODEL
from tests.support.serving import MODEL, RunningServer, ready

pytestmark = needs_compiler

CODE = "def area(width, height):\n    result = width * height\n    return result\n"
BODIES: dict[str, dict[str, Any]] = {
    "repeats": {"prompt": CODE * 4, "max_tokens": 48, "temperature": 0, "logprobs": 2},
    "choices": {"prompt": CODE * 2, "max_tokens": 24, "n": 3, "seed": 5},
    "stops": {"prompt": CODE * 4, "max_tokens": 48, "temperature": 0, "stop": ["return"]},
    "bans": {"prompt": CODE * 3, "max_tokens": 30, "bad_words": ["width"], "temperature": 0},
    "schema": {
        "prompt": CODE,
        "max_tokens": 60,
        "seed": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "areas",
                "schema": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"width": {"type": "integer"}, "height": {"type": "integer"}},
                        "required": ["width", "height"],
                        "additionalProperties": False,
                    },
                    "minItems": 3,
                },
            },
        },
    },
}


def _serve(*flags: str) -> RunningServer:
    sizes = ("--max-model-len", "512", "--kv-cache-memory-bytes", "32M", "--num-threads", "1")
    return RunningServer(str(DEMO_MODEL), "--served-model-name", MODEL, *sizes, *flags)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RunningServer, ...]]:
    """One with drafts, one without."""
    without = ("--speculative-config", '{"num_speculative_tokens": 0}')
    with ready(_serve(), _serve(*without)) as both:
        yield both


def _answer(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.complete(**fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return {"choices": found["choices"], "usage": found["usage"]}


@pytest.mark.parametrize("name", BODIES)
def test_answers_usage_and_logprobs_are_the_same(
    servers: tuple[RunningServer, ...], name: str
) -> None:
    drafted, plain = servers
    expected = _answer(plain, **BODIES[name])
    for _ in range(2):  # what the first has said is a source of the second's drafts
        found = _answer(drafted, **BODIES[name])
        for usage in (found["usage"], expected["usage"]):
            usage.pop("prompt_tokens_details", None)  # the second's prompt is cached
        assert found == expected


def test_drafts_are_counted_by_source_and_under_vllms_names() -> None:
    with ready(_serve("--metrics-alias", "vllm")) as (server,):
        for _ in range(2):
            server.complete(**BODIES["repeats"])
        text = server.get("/metrics").text
    counts: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if "spec_decode" in name and not line.startswith("#"):
            counts[name] = counts.get(name, 0) + float(value)
    accepted = counts["penstock_spec_decode_accepted_tokens_total"]
    assert accepted > 10
    assert counts["penstock_spec_decode_draft_tokens_total"] >= accepted
    assert counts["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted


def test_a_prediction_is_a_source_of_drafts_and_of_nothing_else(
    servers: tuple[RunningServer, ...],
) -> None:
    drafted, plain = servers
    fields = {"temperature": 0, "max_tokens": 60}
    expected = plain.chat(**fields).json()
    answer = expected["choices"][0]["message"]["content"]
    for content in (answer, [{"type": "text", "text": answer}]):
        prediction = {"type": "content", "content": content}
        found = drafted.chat(**fields, prediction=prediction).json()
        assert found["choices"] == expected["choices"]
        details = found["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 4 and answer
        wrong = {"type": "content", "content": "Something that it does not say at all."}
        found = drafted.chat(**fields, prediction=wrong).json()
        assert found["choices"] == expected["choices"]
        assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "image", "content": "x"}, "prediction.type"),
        (
            {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
            "prediction.content[0].type",
        ),
        ({"type": "content", "content": "x" * 100_000}, "prediction"),
    ],
)
def test_a_prediction_that_is_none_is_refused(
    servers: tuple[RunningServer, ...], prediction: Any, param: str
) -> None:
    response = servers[0].chat(prediction=prediction)
    assert response.status_code == 400, response.text
    assert param in json.dumps(response.json()["error"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speculative-config", '{"method": "eagle"}'), "method is ngram, suffix or draft_model"),
        (("--speculative-config", '{"modle": "x"}'), "modle"),
        (("--speculative-config", '{"model": "/nowhere/x"}'), "/nowhere/x"),
        (("--speculative-config", '{"model": "x", "method": "ngram"}'), "need each other"),
        (("--speculative-config", '{"method": "draft_model"}'), "need each other"),
        (("--speculative-config", '{"quantization": "int8"}'), "quantization"),
        (
            ("--speculative-config", f'{{"model": "{DEMO_MODEL}"}}', "--tensor-parallel-size", "2"),
            "needs one process",
        ),
        (
            ("--speculative-config", '{"method": "ngram"}', "--tensor-parallel-size", "2"),
            "--speculative-config needs one process",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(flags: tuple[str, ...], message: str) -> None:
    code, errors = _serve(*flags).exit_code()
    assert code == 2 and message in errors and "Traceback" not in errors, errors


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "draft"
    shutil.copytree(DEMO_MODEL, copy)
    text = (copy / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["a"] = vocabulary["a"], vocabulary["e"]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    wanted = json.dumps({"model": str(copy)})
    code, errors = _serve("--speculative-config", wanted).exit_code()
    assert code == 2 and "has another tokenizer" in errors and "Traceback" not in errors, errors
    (copy / "config.json").write_text('{"architectures": ["X"]}', encoding="utf-8")
    code, errors = _serve("--speculative-config", wanted).exit_code()
    assert code == 2 and str(copy) in errors and "Traceback" not in errors, errors


def test_a_server_with_a_draft_model_answers_what_one_without_does_and_counts_its_drafts(
    servers: tuple[RunningServer, ...],
) -> None:
    wanted = json.dumps({"model": str(DEMO_MODEL), "num_speculative_tokens": 4})
    with ready(_serve("--speculative-config", wanted)) as (server,):
        # It takes as long as the served model, and is tried now and then none the less.
        for seed in range(8):
            server.complete(prompt="Once", max_tokens=60, seed=seed, ignore_eos=True)
        text = server.get("/metrics").text
        assert "draft_model" in server.log()
        for name, body in BODIES.items():
            found, expected = (_answer(each, **body)["choices"] for each in (server, servers[1]))
            assert found == expected, name
    counts = re.findall(r'penstock_spec_decode_(\w+)_total\{source="model"\} (\S+)', text)
    numbers = {name: float(count) for name, count in counts}
    assert numbers["draft_tokens"] >= 1 and numbers["accepted_tokens"] == numbers["draft_tokens"]

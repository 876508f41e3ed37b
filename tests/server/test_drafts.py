"""A server whose steps have drafts answers what one without answers, and counts them."""

import json
import os
import re
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.load import events_of, joined
from tests.server.api.test_handover import KEY, answers_in, resume
from tests.server.test_life import engine_pid
from tests.server.test_restart import kill_engine
from tests.support.compiler import needs_compiler
from tests.support.paths import DEMO_MODEL
from tests.support.serving import MODEL, RunningServer, ready, wait_until

pytestmark = needs_compiler

COMPLETIONS = "/v1/completions"
PLAIN = ("--speculative-config", '{"num_speculative_tokens": 0}')

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
def servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunningServer, ...]]:
    """One with drafts, one without."""
    file = tmp_path_factory.mktemp("keys") / "handover"
    file.write_text(KEY + "\n")
    key = ("--handover-key-file", str(file))
    with ready(_serve(*key), _serve(*PLAIN, *key)) as both:
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


def _counts(server: RunningServer) -> list[float]:
    """How many rows had drafts, how many drafts there were, and how many were accepted, so far."""
    names = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    counts = dict.fromkeys(names, 0.0)
    for line in server.get("/metrics").text.splitlines():
        name = line.partition("{")[0].removeprefix("penstock_spec_decode_")
        if name in counts:
            counts[name] += float(line.rpartition(" ")[2])
    return list(counts.values())


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_so_they_are_with_several_ranks_or_stages(flag: str) -> None:
    without = ("--speculative-config", '{"num_speculative_tokens": 0}')
    # Sums over ranks round otherwise than those of one process.
    plain_flags = (flag, "2") if flag.startswith("--tensor") else ()
    with ready(_serve(flag, "2"), _serve(*plain_flags, *without)) as (drafted, plain):
        for name in BODIES:
            expected = _answer(plain, **BODIES[name])["choices"]
            for _ in range(2):
                assert _answer(drafted, **BODIES[name])["choices"] == expected
        assert _counts(drafted)[2] > 20 and not any(_counts(plain))


def test_the_demo_models_own_draft_is_used_and_changes_no_answer(
    servers: tuple[RunningServer, ...],
) -> None:
    drafted, plain = servers
    for seed in range(4):
        question = {"role": "user", "content": f"Tell me a story about {seed} foxes."}
        fields = {"messages": [question], "max_tokens": 150, "seed": seed, "temperature": 0.5}
        expected = plain.chat(**fields).json()["choices"]
        assert drafted.chat(**fields).json()["choices"] == expected
    # Asked for as many as are worth their time here, and tried after 128 tokens in any case.
    assert drafted.metric('spec_decode_draft_tokens_total{source="model"}') > 0


def test_drafts_are_counted_by_source_and_under_vllms_names() -> None:
    with ready(_serve("--metrics-alias", "vllm")) as (server,):
        for _ in range(2):
            server.complete(**BODIES["repeats"])
        text = server.get("/metrics").text
    counts: defaultdict[str, float] = defaultdict(float)
    by_position: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        if "spec_decode" in name and not line.startswith("#"):
            counts[name] += float(value)
            if position := re.search(r'position="(\d+)"', labels):
                by_position[name][int(position[1])] += int(float(value))
    accepted = counts["penstock_spec_decode_accepted_tokens_total"]
    assert accepted > 10
    assert counts["penstock_spec_decode_draft_tokens_total"] >= accepted
    assert counts["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
    own = by_position["penstock_spec_decode_accepted_tokens_per_pos_total"]
    assert by_position["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == own
    reached = by_position["penstock_spec_decode_reached_tokens_per_pos_total"]
    assert reached[0] == counts["penstock_spec_decode_drafts_total"]
    # A draft is reached once that before it was accepted, if there is one.
    for at in range(8):
        assert own[at] <= reached[at] and reached[at + 1] <= own[at]
    assert own[1] > 0


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
        assert details["accepted_prediction_tokens"] > 0 and answer
        wrong = {"type": "content", "content": "Something that it does not say at all."}
        found = drafted.chat(**fields, prediction=wrong).json()
        assert found["choices"] == expected["choices"]
        assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_a_stop_string_leaves_the_prediction_in_the_usage(
    servers: tuple[RunningServer, ...],
) -> None:
    drafted, plain = servers
    fields = {"temperature": 0, "max_tokens": 60}
    answer = plain.chat(**fields).json()["choices"][0]["message"]["content"]
    stop = answer[-12:-4]
    assert answer.count(stop) == 1
    prediction = {"type": "content", "content": answer}
    expected = plain.chat(**fields, stop=[stop]).json()
    found = drafted.chat(**fields, stop=[stop], prediction=prediction).json()
    assert found["choices"] == expected["choices"]
    assert found["choices"][0]["finish_reason"] == "stop"
    details = found["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 4
    wrong = {"type": "content", "content": answer.replace(" ", " x ")}
    found = drafted.chat(**fields, stop=[stop], prediction=wrong).json()
    assert found["choices"] == expected["choices"]
    assert found["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_an_answer_with_drafts_goes_on_after_its_engine_was_killed(
    servers: tuple[RunningServer, ...],
) -> None:
    drafted, plain = servers
    body: dict[str, Any] = {"model": MODEL, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    body |= BODIES["repeats"] | {"max_tokens": 300, "n": 3, "ignore_eos": True}
    expected = list(joined(events_of(plain.post(COMPLETIONS, body).text)))
    names = ("resumed_requests_total", 'spec_decode_accepted_tokens_total{source="ngram"}')
    before = [drafted.metric(name) for name in names]
    pid = engine_pid(drafted)
    with httpx.stream("POST", drafted.url + COMPLETIONS, json=body, timeout=60) as response:
        incoming = response.iter_lines()
        lines = [next(incoming) for _ in range(6)]
        os.kill(pid, signal.SIGKILL)
        lines += incoming
    assert list(joined(events_of("\n".join(lines)))) == expected
    num_resumed, num_accepted = (
        drafted.metric(name) - was for name, was in zip(names, before, strict=True)
    )
    assert num_resumed == 1 and num_accepted > 100
    wait_until(lambda: drafted.get("/ready").status_code == 200)


@pytest.mark.parametrize("name", ["repeats", "choices", "schema"])
def test_an_answer_goes_on_at_another_server_with_drafts_and_without(
    servers: tuple[RunningServer, ...], name: str
) -> None:
    body: dict[str, Any] = {"model": MODEL, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    body |= BODIES[name] | {"return_token_ids": True}
    wholes = [events_of(server.post(COMPLETIONS, body).text) for server in servers]
    expected = list(joined(wholes[1]))
    for whole, other in zip(wholes, reversed(servers), strict=True):
        # On a busy machine an event has many tokens: perhaps all of them.
        end = next(i for i, e in enumerate(whole) for c in e["choices"] if c["finish_reason"])
        begun = whole[: (end + 1) // 2]
        answers = answers_in(begun, body.get("n", 1))
        handed = {"path": COMPLETIONS, "body": body, "answers": answers}
        reply = resume(other, handed)
        assert reply.status_code == 200, reply.text
        assert list(joined(begun + events_of(reply.text))) == expected


def test_blocks_of_a_tier_that_were_written_with_drafts_serve_without_and_the_reverse(
    tmp_path: Path,
) -> None:
    """A server reads what the one before has computed, answer and drafts included."""

    def answers(server: RunningServer, code: str) -> list[Any]:
        turns = [BODIES[name] for name in ("repeats", "choices")]
        turns = [body | {"prompt": body["prompt"].replace(CODE, code)} for body in turns]
        said = [_answer(server, **body)["choices"] for body in turns]
        # The next turn: its prompt is in the blocks of the last one and its answer.
        prompt = turns[0]["prompt"] + said[0][0]["text"]
        return [*said, _answer(server, **turns[0] | {"prompt": prompt})["choices"]]

    other = CODE.replace("area", "surface")
    found = []
    for flags, codes in (((), [CODE]), (PLAIN, [CODE, other]), ((), [other])):
        with ready(_serve(*flags, "--kv-offload-dir", str(tmp_path))) as (server,):
            for number, code in enumerate(codes):
                found.append(answers(server, code))
                if number == 0 and len(found) > 1:
                    assert server.metric("kv_offload_hit_tokens_total") > 100
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
    assert found[0] == found[1] and found[2] == found[3]


ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": CODE * 4, "max_tokens": 48},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": CODE * 4}]},
    "/v1/responses": {"input": CODE * 4},
    "/v1/messages": {"messages": [{"role": "user", "content": CODE * 4}], "max_tokens": 48},
    "/completion": {"prompt": CODE * 4, "n_predict": 48},
}


@pytest.mark.parametrize("path", ASKED)
def test_a_request_lowers_the_number_of_its_drafts(
    servers: tuple[RunningServer, ...], path: str
) -> None:
    drafted, _ = servers
    fields = {"temperature": 0} | ASKED[path]

    def ask(**more: int) -> tuple[float, float]:
        """How many rows had drafts, and how many drafts there were."""
        before = _counts(drafted)
        response = drafted.post(path, fields | more)
        assert response.status_code == 200, response.text
        rows, drafts, _ = (b - a for a, b in zip(before, _counts(drafted), strict=True))
        return rows, drafts

    ask()  # what it says is a source of the drafts of those that follow
    rows, drafts = ask()
    assert drafts > rows > 0
    assert ask(num_speculative_tokens=0) == (0, 0)
    rows, drafts = ask(num_speculative_tokens=1)
    assert drafts == rows > 0
    rows, drafts = ask(num_speculative_tokens=1000)
    assert rows < drafts <= 8 * rows


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
        (("--speculative-config", '{"method": "eagle"}'), "method is ngram, suffix, mtp or draft_"),
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
            ("--speculative-config", '{"method": "ngram"}', "--kv-cache-dtype", "fp8"),
            "--speculative-config needs the compiled step of a CPU",
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
        expected = {name: _answer(servers[1], **body)["choices"] for name, body in BODIES.items()}
        for is_first in (True, False):
            for name, body in BODIES.items():
                assert _answer(server, **body)["choices"] == expected[name], name
            if is_first:  # the served model's blocks outlive its engine, the draft model's do not
                kill_engine(server)
                wait_until(lambda: server.get("/ready").status_code == 200)
    counts = re.findall(r'penstock_spec_decode_(\w+)_total\{source="model"\} (\S+)', text)
    numbers = {name: float(count) for name, count in counts}
    assert numbers["draft_tokens"] >= 1 and numbers["accepted_tokens"] == numbers["draft_tokens"]

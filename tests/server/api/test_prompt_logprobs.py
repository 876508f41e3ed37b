"""The logprobs of a prompt's own tokens: echo with logprobs, `prompt_logprobs`, `max_tokens: 0`.

The oracle is transformers, on the demo model.
"""

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from penstock.scheduler.prompt_logprobs import PackedLogprobs, PromptLogprobs
from penstock.server.api.openai.writer import LongLists
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.output.logprobs import EchoedTokens
from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer

FOLDER = ROOT / "engine" / "hub" / "demo_model"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TEXT = "Once upon a time there was a little cat"
IDS = TOKENIZER.encode(TEXT).ids
NEAR = 2e-3  # the engine computes other sums than torch does
EOS = 2


@pytest.fixture(scope="module")
def server(exact_server: RunningServer) -> RunningServer:
    return exact_server


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def oracle(model: Any, ids: list[int]) -> torch.Tensor:
    """Row i: the log probabilities of what comes after token i."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    table: torch.Tensor = logits.log_softmax(-1)
    return table


def body_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.complete(temperature=0, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def choice_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = body_of(server, **fields)["choices"][0]
    return choice


def test_echoed_logprobs_are_those_of_transformers(server: RunningServer, model: Any) -> None:
    logprobs = choice_of(server, prompt=TEXT, echo=True, logprobs=3, max_tokens=0)["logprobs"]
    table = oracle(model, IDS)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = [table[i, IDS[i + 1]].item() for i in range(len(IDS) - 1)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=NEAR)
    for row, top in zip(table, logprobs["top_logprobs"][1:], strict=False):
        best = row.topk(3).values.tolist()
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=NEAR)


def test_text_offset_is_where_each_echoed_token_begins(server: RunningServer) -> None:
    choice = choice_of(server, prompt=TEXT, echo=True, logprobs=0, max_tokens=5)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert len(logprobs["tokens"]) == len(IDS) + 5
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


SPECIAL_TEXT = "<|im_start|>user\nHi<|im_end|>\n"


def test_text_offset_counts_the_special_tokens_of_the_prompt(server: RunningServer) -> None:
    for prompt in (SPECIAL_TEXT, TOKENIZER.encode(SPECIAL_TEXT).ids):
        choice = choice_of(server, prompt=prompt, echo=True, logprobs=0, max_tokens=3)
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(SPECIAL_TEXT)
        assert logprobs["text_offset"][:2] == [0, len("<|im_start|>")]
        num_prompt = len(logprobs["tokens"]) - 3  # an answer's special tokens are not shown
        for token, offset in zip(
            logprobs["tokens"][:num_prompt], logprobs["text_offset"], strict=False
        ):
            assert choice["text"][offset:].startswith(token)


def test_a_token_that_the_tokenizer_adds_takes_no_room_in_the_echo() -> None:
    vocabulary = Vocabulary(TOKENIZER)
    ids = TOKENIZER.encode(SPECIAL_TEXT).ids
    bos = ids[0]

    def offsets(token_ids: list[int], echo: str) -> list[int]:
        unknown = PackedLogprobs.of([PromptLogprobs(-1.0, 1, ())] * (len(token_ids) - 1))
        slices = EchoedTokens(vocabulary, token_ids, unknown, echo).slices()
        return [token.offset for tokens in slices for token in tokens]

    assert offsets([bos, *ids], SPECIAL_TEXT) == [0, *offsets(ids, SPECIAL_TEXT)]
    # A text that the tokenizer changes, here by its Unicode form.
    assert offsets([bos, *ids[1:4]], "u\u0308ser")[:2] == [0, 0]


def test_the_answer_after_an_echo_has_the_logprobs_that_it_has_alone(
    server: RunningServer,
) -> None:
    fields = {"prompt": TEXT, "logprobs": 2, "max_tokens": 6}
    alone, echoed = (choice_of(server, echo=e, **fields)["logprobs"] for e in (False, True))
    for name in ("tokens", "top_logprobs"):
        assert echoed[name][len(IDS) :] == alone[name]
    offsets = [offset - len(TEXT) for offset in echoed["text_offset"][len(IDS) :]]
    assert offsets == alone["text_offset"]


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_echoes_what_the_plain_answer_has(
    server: RunningServer, max_tokens: int, n: int
) -> None:
    prompts = [TEXT, "The cat"]
    fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": n}
    plain = body_of(server, **fields)
    text = server.complete(
        temperature=0, stream=True, stream_options={"include_usage": True}, **fields
    ).text
    events = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
    assert events[-1]["usage"] | {"prompt_tokens_details": None} == plain["usage"] | {
        "prompt_tokens_details": None
    }
    for choice in plain["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [v for p in parts if p["logprobs"] for v in p["logprobs"][name]] == values
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_no_tokens_without_echo_are_an_empty_text_and_the_prompts_usage(
    server: RunningServer,
) -> None:
    before = server.metric("generated_tokens_total")
    body = body_of(server, prompt=[IDS, IDS[:3]], max_tokens=0, n=2)
    assert [c["text"] for c in body["choices"]] == [""] * 4
    assert {c["finish_reason"] for c in body["choices"]} == {"length"}
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS) + 3, 0)
    assert server.metric("generated_tokens_total") == before


def test_a_prompt_may_fill_the_whole_context_if_max_tokens_is_0(
    server: RunningServer,
) -> None:
    limit = server.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    ids = [50 + i % 40 for i in range(limit)]
    body = body_of(server, prompt=ids, echo=True, logprobs=1, max_tokens=0)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == limit
    for prompt, max_tokens in ((ids, 1), ([*ids, 50], 0)):
        response = server.complete(prompt=prompt, max_tokens=max_tokens)
        assert response.json()["error"]["code"] == "context_length_exceeded"
    kept = body_of(server, prompt=[*ids, 50], max_tokens=0, truncate_prompt_tokens=-1)
    assert kept["usage"]["prompt_tokens"] == limit


def loglikelihoods(body: dict[str, Any], num_contexts: list[int]) -> list[tuple[float, bool]]:
    """As lm-evaluation-harness reads an answer to `local-completions`: the last entry is of the one
    token that was sampled, and greedy is what equals the best."""
    read = []
    for choice, num_context in zip(body["choices"], num_contexts, strict=True):
        logprobs = choice["logprobs"]
        own = logprobs["token_logprobs"][num_context:-1]
        best = [max(top.values()) for top in logprobs["top_logprobs"][num_context:-1]]
        read.append((sum(own), own == best))
    return read


@pytest.mark.parametrize("ends_at_once", [False, True])
def test_lm_evaluation_harness_reads_the_likelihood_of_a_continuation(
    server: RunningServer, model: Any, ends_at_once: bool
) -> None:
    prompts = [IDS, TOKENIZER.encode("The cat sat on the moon").ids, IDS[:4]]
    num_contexts = [4, 2, 3]
    bias = {"logit_bias": {str(EOS): 100}} if ends_at_once else {}
    fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, **bias}
    body = body_of(server, **fields)
    assert {c["finish_reason"] for c in body["choices"]} == {"stop" if ends_at_once else "length"}
    for ids, start, (total, is_greedy) in zip(
        prompts, num_contexts, loglikelihoods(body, num_contexts), strict=True
    ):
        table = oracle(model, ids)[start - 1 : -1]
        own = table.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        assert total == pytest.approx(own.sum().item(), abs=NEAR * len(ids))
        assert is_greedy == bool((own == table.max(-1).values).all())


def test_prompt_logprobs_have_logprob_rank_and_text_of_each_position(
    server: RunningServer, model: Any
) -> None:
    choice = choice_of(server, prompt=TEXT, prompt_logprobs=2, max_tokens=1)
    positions = choice["prompt_logprobs"]
    assert positions[0] is None and len(positions) == len(IDS)
    assert choice["logprobs"] is None
    for token_id, row, known in zip(IDS[1:], oracle(model, IDS), positions[1:], strict=False):
        own = known[str(token_id)]
        assert own["logprob"] == pytest.approx(row[token_id].item(), abs=NEAR)
        assert own["rank"] == 1 + int((row > row[token_id]).sum())
        assert own["decoded_token"] == TOKENIZER.decode([token_id])
        best = {str(i): rank for rank, i in enumerate(row.topk(2).indices.tolist(), start=1)}
        assert {i: k["rank"] for i, k in known.items() if i in best} == best
        assert set(known) == {str(token_id), *best}


def test_prompt_logprobs_0_has_only_the_prompts_own_tokens(server: RunningServer) -> None:
    positions = choice_of(server, prompt=IDS, prompt_logprobs=0)["prompt_logprobs"]
    assert [list(known) for known in positions[1:]] == [[str(i)] for i in IDS[1:]]


def test_every_choice_has_the_logprobs_of_its_own_prompt(server: RunningServer) -> None:
    prompts = [TEXT, "The cat"]
    body = body_of(server, prompt=prompts, n=2, best_of=3, prompt_logprobs=0, max_tokens=2)
    lengths = [len(choice["prompt_logprobs"]) for choice in body["choices"]]
    assert lengths == [len(IDS)] * 2 + [len(TOKENIZER.encode("The cat").ids)] * 2


def test_more_prompt_logprobs_than_echoed_ones_leave_the_echo_alone(server: RunningServer) -> None:
    fields = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 1}
    plain, both = (choice_of(server, **fields, **more) for more in ({}, {"prompt_logprobs": 4}))
    assert both["logprobs"] == plain["logprobs"]
    assert len(both["prompt_logprobs"][1]) >= 4


def test_a_chat_answer_has_its_prompts_logprobs_outside_the_choices(server: RunningServer) -> None:
    body = server.chat(prompt_logprobs=1, n=2, return_token_ids=True).json()
    positions = body["prompt_logprobs"]
    assert positions[0] is None
    for token_id, known in zip(body["prompt_token_ids"][1:], positions[1:], strict=True):
        assert known[str(token_id)]["logprob"] <= 0


def test_best_of_weighs_the_answers_and_not_the_echo(server: RunningServer) -> None:
    fields = {"prompt": TEXT, "temperature": 1.2, "seed": 5, "max_tokens": 9, "best_of": 5}
    plain = server.complete(**fields).json()["choices"][0]["text"]
    echoed = server.complete(**fields, echo=True, logprobs=0).json()["choices"][0]
    assert echoed["text"] == TEXT + plain


def test_prompt_outputs_are_the_same_whatever_is_cached(server: RunningServer) -> None:
    ids = (IDS * 20)[:90]
    fields = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 0}
    first, again = (choice_of(server, **fields) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_unsupported_prompt_outputs_are_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = server.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_chat_needs_room_for_a_token_of_its_answer(server: RunningServer) -> None:
    error = server.chat(max_tokens=0).json()["error"]
    assert error["param"] == "max_tokens"


def test_long_lists_are_sent_in_the_pieces_in_which_they_were_encoded() -> None:
    lists = LongLists()
    value = {"a": lists.add([b"[1,2]", b"[]", b"[3]"]), "b": [lists.add([])], "c": "\0"}
    pieces = lists.encoded(value)
    assert json.loads(b"".join(pieces)) == {"a": [1, 2, 3], "b": [[]], "c": "\0"}
    assert b"[1,2" in pieces and b",3" in pieces

"""`/tokenize`, `/detokenize`, and the schema that says so."""

import re
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.paths import ROOT
from tests.support.serving import ALIAS, MODEL, RunningServer

TOKENIZER = Tokenizer.from_file(str(ROOT / "engine" / "hub" / "demo_model" / "tokenizer.json"))
USER = {"role": "user", "content": "Who are you?"}
TEXT = "Once upon a time, caf\u00e9 \U0001f431"


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


def tokenize(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/tokenize", fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_text_becomes_ids_with_their_count_and_max_model_len(server: RunningServer) -> None:
    body = tokenize(server, model=MODEL, prompt=TEXT)
    ids = TOKENIZER.encode(TEXT).ids
    card = server.get(f"/v1/models/{MODEL}").json()
    assert body == {
        "count": len(ids),
        "max_model_len": card["max_model_len"],
        "tokens": ids,
        "token_strs": None,
    }


def test_no_model_has_to_be_named_and_another_is_not_found(server: RunningServer) -> None:
    assert tokenize(server, prompt=TEXT) == tokenize(server, prompt=TEXT, model=ALIAS)
    for path, fields in (
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": [USER]}),
        ("/detokenize", {"tokens": [1]}),
    ):
        response = server.post(path, {"model": "other", **fields})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_return_token_strs_names_each_token(server: RunningServer) -> None:
    body = tokenize(server, prompt=TEXT, return_token_strs=True)
    assert body["token_strs"] == TOKENIZER.encode(TEXT).tokens


def test_a_conversation_has_the_tokens_that_the_chat_answer_counts(server: RunningServer) -> None:
    num_tokens = server.chat().json()["usage"]["prompt_tokens"]
    body = tokenize(server, messages=[USER])
    assert body["count"] == len(body["tokens"]) == num_tokens
    shorter = tokenize(server, messages=[USER], add_generation_prompt=False)
    assert body["tokens"][: shorter["count"]] == shorter["tokens"] != body["tokens"]


def test_detokenize_is_the_way_back(server: RunningServer) -> None:
    for fields in ({"prompt": TEXT}, {"messages": [USER]}):
        ids = tokenize(server, **fields)["tokens"]
        text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
        assert text == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", [], None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_an_invalid_prompt_is_refused_by_field(
    server: RunningServer, path: str, body: Any, param: str | None
) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_add_special_tokens_decides_on_the_bos_of_texts_and_conversations() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    bos = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    encoder = PromptEncoder(tokenizer, None, {})
    plain = encoder.encode("Once", add_special_tokens=False)
    assert encoder.encode("Once") == (0, *plain)
    assert encoder.encode_prompt("Once", add_special_tokens=False) == plain
    assert encoder.encode("Once", add_special_tokens=False) == plain
    assert encoder.encode("Once") == (0, *plain)


def test_every_route_is_in_the_schema_with_its_body_and_its_errors(server: RunningServer) -> None:
    schema = server.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/messages"):
        operation = schema["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(
            operation["responses"]
        )
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "min_tokens", "best_of", "echo"} <= set(fields)
    assert schema["paths"]["/rerank"]["post"]["requestBody"]
    assert "422" not in server.get("/openapi.json").text


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_a_page_that_shows_the_schema_loads_nothing_from_elsewhere(
    server: RunningServer, path: str
) -> None:
    response = server.get(path)
    assert "default-src 'none'; script-src 'self';" in response.headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="(?!data:)([^"]*)"', response.text)
    assert len(loaded) >= 2 and not any(":" in url or url.startswith("/") for url in loaded)
    assert all(server.get(f"/{url}").status_code == 200 for url in loaded)
    assert server.get("/docs/nothing.js").status_code == 404


@pytest.mark.parametrize("size", [200_000, 2**20])
def test_a_text_that_the_context_could_not_hold_is_counted(
    server: RunningServer, size: int
) -> None:
    text = ("Once upon a time. " * (size // 18 + 1))[:size]
    counted = tokenize(server, prompt=text)
    assert counted["count"] == len(TOKENIZER.encode(text).ids) > counted["max_model_len"]
    if size == 200_000:
        chat = tokenize(server, messages=[{**USER, "content": text}])
        assert chat["count"] > counted["count"]


def test_a_text_of_more_than_a_mebibyte_is_counted_only_if_the_context_could_hold_it(
    server: RunningServer,
) -> None:
    text = "Once upon a time. " * 60_000
    for fields in ({"prompt": text}, {"messages": [{**USER, "content": text}]}):
        response = server.post("/tokenize", fields)
        assert response.status_code == 400
        assert "shorten it" in response.json()["error"]["message"]

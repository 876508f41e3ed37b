"""Bodies with very many values are refused before they are parsed, whatever their texts contain."""

import asyncio
import json
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.errors import InvalidRequest
from penstock.server.http import body as body_module
from penstock.server.http.body import LIMITS, SignCounts, check_parsable, sign_beyond_limit
from tests.support.serving import RunningServer

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\{[:,}]\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='"\\{:'), inner),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


def post(server: RunningServer, body: bytes) -> httpx.Response:
    return server.request("POST", "/v1/completions", content=body, timeout=60)


def num_signs(value: Any) -> dict[bytes, int]:
    """Outside of texts."""
    counts = dict.fromkeys(LIMITS, 0)

    def visit(value: Any) -> None:
        if isinstance(value, dict | list):
            counts[b"{" if isinstance(value, dict) else b"["] += 1
            counts[b","] += max(0, len(value) - 1)
        if isinstance(value, dict):
            counts[b":"] += len(value)
            value = list(value.values())
        for each in value if isinstance(value, list) else ():
            visit(each)

    visit(value)
    return counts


@given(VALUES, st.integers(1, 9))
def test_exactly_the_signs_outside_of_texts_count(value: Any, chunk_bytes: int) -> None:
    body, counts = json.dumps(value).encode(), num_signs(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_CHUNK_BYTES", chunk_bytes)
        patch.setattr(body_module, "LIMITS", counts)
        assert sign_beyond_limit(body) is None
        for sign, count in counts.items():
            patch.setattr(body_module, "LIMITS", counts | {sign: count - 1})
            assert sign_beyond_limit(body) == sign


@pytest.mark.parametrize(
    ("part", "sign"), [("{}", "{"), ("[]", "["), ("[[[[]]]]", "["), ('{"a":1}', "{"), ("1", ",")]
)
def test_a_body_of_very_many_values_is_a_400_that_says_of_which(
    server: RunningServer, part: str, sign: str
) -> None:
    num = LIMITS[sign.encode()] + 2
    body = f'{{"prompt":"Once","max_tokens":1,"x":[{",".join([part] * num)}]}}'
    error = post(server, body.encode()).json()["error"]
    assert error["code"] == "body_too_complex"
    assert f"{LIMITS[sign.encode()]} {sign!r}" in error["message"]


def test_very_many_members_are_too_many(server: RunningServer) -> None:
    members = {f"x{i}": 1 for i in range(LIMITS[b":"] + 1)}
    error = post(server, json.dumps(members).encode()).json()["error"]
    assert error["code"] == "body_too_complex"


def test_brackets_nested_beyond_what_any_parser_takes_are_a_400(server: RunningServer) -> None:
    answer = post(server, b"[" * 10_000_000)
    assert answer.status_code == 400
    answer = post(server, b'{"prompt":' + b"[" * 16_000)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("sign", ["{", "[", ":", ",", "\\", '"', '\\"{', "{\\\\"])
def test_what_a_text_has_many_of_does_not_count(server: RunningServer, sign: str) -> None:
    text = sign * ((LIMITS[b"{"] if "{" in sign else max(LIMITS.values())) + 1)
    answer = post(server, json.dumps({"prompt": "Once", "max_tokens": 1, "x": text}).encode())
    assert answer.status_code == 200


def test_a_text_of_very_many_escapes_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_module, "MAX_ESCAPES", 9)
    for num, is_refused in ((9, False), (10, True)):
        counts = SignCounts()
        body = b'{"prompt":"' + b"\\u00e9" * num + b'"}'
        counts.add(body[:14])
        counts.add(body[14:])
        refused = (
            pytest.raises(InvalidRequest, match="backslashes") if is_refused else nullcontext()
        )
        with refused:
            asyncio.run(check_parsable(body, counts))

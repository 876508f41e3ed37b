"""The real OpenAI client, with its own strict validation of what comes back."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.serving import ALIAS, MODEL, RunningServer


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


USER = {"role": "user", "content": "Who are you?"}


def ask(client: openai.OpenAI, **fields: object) -> openai.types.chat.ChatCompletion:
    options = {"model": MODEL, "messages": [USER], "max_tokens": 12, "seed": 3} | fields
    answer: openai.types.chat.ChatCompletion = client.chat.completions.create(**options)  # type: ignore[call-overload]
    return answer


def test_a_chat_answer_passes_the_clients_strict_validation(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content
    assert answer.usage and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_chat_stream_joins_to_the_plain_answer(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Who are you?"}],
        max_tokens=12,
        seed=3,
        stream=True,
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"


def test_the_stream_helper_of_the_client_accumulates_a_whole_answer(client: openai.OpenAI) -> None:
    stop = ask(client).choices[0].message.content
    assert stop
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Who are you?"}],
        max_tokens=12,
        seed=3,
        stop=[stop[-3:]],
        stream_options={"include_usage": True},
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.usage and final.usage.prompt_tokens > 0


def test_completions_of_a_batch_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    both = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=6, seed=5)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for i, prompt in enumerate(["a", "b"]):
        alone = client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=6, seed=5)
        texts = [choice.text for choice in both.choices[2 * i : 2 * i + 2]]
        assert texts == [choice.text for choice in alone.choices]


def test_a_prompt_of_ids_is_the_prompt_of_their_text(client: openai.OpenAI) -> None:
    texts = set()
    for prompt in ([50, 60, 70], [[50, 60, 70]]):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, seed=5)
        texts.add(answer.choices[0].text)
    assert len(texts) == 1


def test_a_completion_without_max_tokens_has_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once")
    assert answer.usage and answer.usage.completion_tokens == 16


def test_chat_logprobs_spell_the_content(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs and choice.logprobs.content and choice.message.content
    spelled = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or ())
    assert spelled.decode(errors="replace") == choice.message.content
    assert len(choice.logprobs.content) == 12


def test_streamed_logprobs_are_those_of_the_plain_answer(client: openai.OpenAI) -> None:
    plain = ask(client, logprobs=True).choices[0].logprobs
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Who are you?"}],
        max_tokens=12,
        seed=3,
        logprobs=True,
        stream=True,
    )
    entries = []
    for chunk in stream:
        if logprobs := chunk.choices[0].logprobs:
            entries += logprobs.content or []
    assert plain and [e.token for e in entries] == [e.token for e in plain.content or ()]


def test_completion_logprobs_run_parallel_and_offsets_point_into_the_text(
    client: openai.OpenAI,
) -> None:
    choice = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=10, seed=7, logprobs=1
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs and logprobs.tokens and logprobs.text_offset and logprobs.token_logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs) == 10
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset:].startswith(token)


def test_the_model_list_names_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, ALIAS]
    assert ask(client, model=ALIAS).model == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_unknown_model_is_the_clients_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-5")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(client: openai.OpenAI) -> None:
    assert ask(client).choices[0].message.content == ask(client).choices[0].message.content
    texts = {ask(client, seed=None).choices[0].message.content for _ in range(4)}
    assert len(texts) > 1

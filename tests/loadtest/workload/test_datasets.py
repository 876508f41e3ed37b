"""Files become workloads; errors are reported with their line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.loadtest.workload.config import Dataset, PromptFormat, WorkloadConfig
from penstock.loadtest.workload.datasets import BadDataset
from penstock.loadtest.workload.workload import TimedRequest, make_requests, make_warmup_requests
from penstock.scheduler.errors import InvalidConfig

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:02.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
SHAREGPT = [
    {
        "id": str(number),
        "conversations": [
            {"from": "human", "value": f"Question {number}: what is a block? " * 3},
            {"from": "gpt", "value": "A block holds tokens. " * (number + 2)},
        ],
    }
    for number in range(30)
]


def config(dataset: Dataset, path: Path, **settings: object) -> WorkloadConfig:
    base = WorkloadConfig(dataset=dataset, dataset_path=path)
    return replace(base, **settings)  # type: ignore[arg-type]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def lengths_of(requests: list[TimedRequest]) -> list[tuple[float, int, int]]:
    return [(round(r.arrival_s, 3), r.num_prompt_tokens, r.max_tokens) for r in requests]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE_2023, [(0.0, 374, 44), (4.315, 396, 109)]),
        (AZURE_2024, [(0.0, 2162, 5), (2.007, 2399, 6)]),
    ],
)
def test_azure_traces_of_both_years_keep_their_arrival_times(
    tmp_path: Path, text: str, expected: list[tuple[float, int, int]]
) -> None:
    path = written(tmp_path / "azure.csv", text)
    assert lengths_of(make_requests(config(Dataset.AZURE, path))) == expected


def test_burstgpt_leaves_out_what_failed_and_a_speedup_divides_its_times(tmp_path: Path) -> None:
    path = written(tmp_path / "burst.csv", BURSTGPT)
    requests = make_requests(config(Dataset.BURSTGPT, path, trace_speedup=10.0))
    assert lengths_of(requests) == [(0.0, 472, 18), (11.3, 417, 276)]
    at_once = make_requests(config(Dataset.BURSTGPT, path, trace_speedup=float("inf")))
    assert [request.arrival_s for request in at_once] == [0.0, 0.0]


def test_a_rate_replaces_the_times_of_a_trace(tmp_path: Path) -> None:
    path = written(tmp_path / "burst.csv", BURSTGPT)
    requests = make_requests(config(Dataset.BURSTGPT, path, request_rate=100.0))
    assert 0 < requests[0].arrival_s < requests[1].arrival_s < 2


def mooncake_line(at_ms: int, length: int, hash_ids: list[int]) -> str:
    fields = {"timestamp": at_ms, "input_length": length, "output_length": 7, "hash_ids": hash_ids}
    return json.dumps(fields)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 511)),
        min_size=1,
        max_size=6,
    ),
    is_text=st.booleans(),
)
def test_equal_mooncake_hashes_are_equal_blocks_and_others_are_not(
    tmp_path: Path, rows: list[tuple[list[int], int]], is_text: bool
) -> None:
    """Each prompt has its length, its last block may be cut, and position does not matter."""
    lines = [mooncake_line(0, len(ids) * 512 - short, ids) for ids, short in rows]
    path = written(tmp_path / "mooncake.jsonl", "\n".join(lines))
    text_or_ids = PromptFormat.TEXT if is_text else PromptFormat.IDS
    requests = make_requests(config(Dataset.MOONCAKE, path, prompt_format=text_or_ids))
    blocks: dict[int, list[object]] = {}
    for (hash_ids, short), request in zip(rows, requests, strict=True):
        tokens = request.prompt.split() if isinstance(request.prompt, str) else request.prompt
        assert len(tokens) == request.num_prompt_tokens == len(hash_ids) * 512 - short
        for index, hash_id in enumerate(hash_ids):
            block = list(tokens[index * 512 : (index + 1) * 512])
            longest = max(blocks.get(hash_id, []), block, key=len)
            assert longest[: len(block)] == block
            blocks[hash_id] = longest
            assert blocks[hash_id][: len(block)] == block
    whole = [tuple(block) for block in blocks.values() if len(block) == 512]
    assert len(set(whole)) == len(whole)


def test_mooncake_times_are_milliseconds_and_a_tail_without_hash_is_its_own(tmp_path: Path) -> None:
    lines = [mooncake_line(3000, 600, [9]), mooncake_line(4500, 600, [9])]
    path = written(tmp_path / "mooncake.jsonl", "\n".join(lines))
    first, second = make_requests(config(Dataset.MOONCAKE, path))
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.5)
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:] != second.prompt[512:]


def test_sharegpt_sends_first_turns_with_the_second_turns_lengths(tmp_path: Path) -> None:
    path = written(tmp_path / "sharegpt.json", json.dumps(SHAREGPT))
    requests = make_requests(config(Dataset.SHAREGPT, path, num_prompts=20))
    expected = {}
    for conversation in SHAREGPT:
        human, gpt = conversation["conversations"]
        assert isinstance(human, dict) and isinstance(gpt, dict)
        expected[human["value"]] = round(len(gpt["value"]) / 4)
    assert len({str(request.prompt) for request in requests}) == 20
    assert all(request.max_tokens == expected[str(request.prompt)] for request in requests)
    others = make_requests(config(Dataset.SHAREGPT, path, num_prompts=20, seed=1))
    assert [r.prompt for r in others] != [r.prompt for r in requests]


def test_a_length_for_sharegpt_replaces_that_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "sharegpt.json", json.dumps(SHAREGPT))
    requests = make_requests(config(Dataset.SHAREGPT, path, sharegpt_output_len=33))
    assert {request.max_tokens for request in requests} == {33}
    assert len(requests) == 30


def test_custom_lines_are_sent_in_their_order(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "One"}, {"messages": messages, "max_tokens": 5}]
    path = written(tmp_path / "custom.jsonl", "\n\n".join(map(json.dumps, lines)))
    one, two = make_requests(config(Dataset.CUSTOM, path, is_chat=True))
    assert (one.prompt, one.max_tokens, one.messages) == ("One", 256, None)
    assert (two.messages, two.max_tokens) == (messages, 5)


def test_a_length_for_custom_replaces_that_of_the_line_under_either_name(tmp_path: Path) -> None:
    lines = [{"prompt": "One", "output_tokens": 4}, {"prompt": "Two", "max_tokens": 5}]
    path = written(tmp_path / "custom.jsonl", "\n".join(map(json.dumps, lines)))
    own = make_requests(config(Dataset.CUSTOM, path))
    assert [request.max_tokens for request in own] == [4, 5]
    given = make_requests(config(Dataset.CUSTOM, path, custom_output_len=9))
    assert [request.max_tokens for request in given] == [9, 9]


def test_conversations_that_are_not_shuffled_are_in_the_files_order(tmp_path: Path) -> None:
    path = written(tmp_path / "sharegpt.json", json.dumps(SHAREGPT))
    ordered, again = (
        [r.prompt for r in make_requests(config(Dataset.SHAREGPT, path, seed=s, is_shuffled=False))]
        for s in (1, 2)
    )
    assert ordered == again
    drawn = [request.prompt for request in make_requests(config(Dataset.SHAREGPT, path))]
    assert ordered != drawn and sorted(map(str, ordered)) == sorted(map(str, drawn))


def test_warmup_requests_have_the_same_lengths_and_share_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "mooncake.jsonl", mooncake_line(0, 900, [1, 2]))
    settings = config(Dataset.MOONCAKE, path)
    (request,), (stranger,) = make_requests(settings), make_warmup_requests(settings, 1)
    assert len(stranger.prompt) == len(request.prompt) and stranger.max_tokens == 7
    assert stranger.prompt[:16] != request.prompt[:16]


@pytest.mark.parametrize(
    ("dataset", "text", "message"),
    [
        (Dataset.AZURE, "TIMESTAMP,ContextTokens\n", "line 1: there is no column 'GeneratedTok"),
        (
            Dataset.AZURE,
            AZURE_2023 + "yesterday,1,2\n",
            "line 4: TIMESTAMP is 'yesterday', and not a date",
        ),
        (
            Dataset.AZURE,
            AZURE_2023 + "2023-11-16 18:15:47,x,2\n",
            "line 4: ContextTokens is 'x', and not a whole number",
        ),
        (
            Dataset.AZURE,
            AZURE_2023 + "2023-11-16 18:15:47,5\n",
            "line 4: it has 2 values, and the header 3",
        ),
        (
            Dataset.BURSTGPT,
            BURSTGPT.replace("118", "soon"),
            "line 4: Timestamp is 'soon', and not a number",
        ),
        (Dataset.MOONCAKE, mooncake_line(0, 9, [1]) + "\n{\n", "line 2: input data was trunc"),
        (Dataset.MOONCAKE, '{"timestamp": 1}\n', "line 1: object missing required field"),
        (Dataset.MOONCAKE, mooncake_line(0, 10**12, [1]), "line 1: 1000000000000 tokens are more"),
        (Dataset.BURSTGPT, BURSTGPT.replace("118", "nan"), "line 4: the time is nan"),
        (Dataset.SHAREGPT, '{"id": 1}', "not ShareGPT JSON: expected `array`"),
        (Dataset.SHAREGPT, "[]", "has no request that sharegpt can use"),
        (Dataset.CUSTOM, '{"prompt": "x"}\n\n{"promt": "y"}', "line 3: object contains unknown"),
        (Dataset.CUSTOM, '{"max_tokens": 5}', 'line 1: give either "prompt" or "messages"'),
        (Dataset.CUSTOM, '{"prompt": ""}', "line 1: the prompt is empty"),
        (Dataset.CUSTOM, '{"prompt": "x", "max_tokens": 0}', "line 1: max_tokens is 0"),
        (Dataset.CUSTOM, '{"messages": [{"role": "user"}]}', "line 1: messages require --backend"),
    ],
)
def test_a_bad_file_is_reported_with_its_line(
    tmp_path: Path, dataset: Dataset, text: str, message: str
) -> None:
    path = written(tmp_path / "file", text)
    with pytest.raises(BadDataset, match=message):
        make_requests(config(dataset, path))


@pytest.mark.parametrize("dataset", [Dataset.AZURE, Dataset.MOONCAKE, Dataset.SHAREGPT])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.binary(max_size=80))
def test_whatever_bytes_a_file_has_it_gets_an_error_message(
    tmp_path: Path, dataset: Dataset, data: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(BadDataset, match=re.escape(str(path))):
        make_requests(config(dataset, path))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    for dataset in (Dataset.SHAREGPT, Dataset.AZURE, Dataset.CUSTOM):
        with pytest.raises(BadDataset, match="cannot be read: No such file"):
            make_requests(config(dataset, tmp_path / "none"))


def test_a_dataset_and_its_path_require_each_other() -> None:
    with pytest.raises(InvalidConfig, match="azure requires --dataset-path"):
        WorkloadConfig(dataset=Dataset.AZURE)
    with pytest.raises(InvalidConfig, match="random reads no file; remove --dataset-path"):
        WorkloadConfig(dataset_path=Path("x"))

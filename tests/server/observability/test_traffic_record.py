"""The record of the last hour's requests, and that a simulation reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.workload.config import Dataset, WorkloadConfig
from penstock.loadtest.workload.datasets import BadDataset
from penstock.loadtest.workload.workload import TimedRequest, make_requests
from penstock.scheduler.errors import InvalidConfig
from penstock.server.observability.traffic_record import BLOCK_TOKENS, TrafficRecord


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def make_record(path: Path, clock: Clock, **options: Any) -> TrafficRecord:
    return TrafficRecord(path, {"max_num_seqs": 4}, clock=clock, **options)


def add(record: TrafficRecord, ids: list[int], *, tenant: str = "", num_output: int = 5) -> None:
    record.add(tuple(ids), num_output_tokens=num_output, tenant=tenant, priority=2, age_s=0.25)


def read(path: Path, *, num_prompts: int = 1000) -> list[TimedRequest]:
    return make_requests(
        WorkloadConfig(dataset=Dataset.TRAFFIC, dataset_path=path, num_prompts=num_prompts)
    )


def test_a_simulation_gets_lengths_arrivals_tenants_and_shared_beginnings(tmp_path: Path) -> None:
    path, clock = tmp_path / "traffic.jsonl", Clock()
    record = make_record(path, clock)
    shared = list(range(3 * BLOCK_TOKENS))
    add(record, shared + [7] * 10, tenant="key-a")
    clock.now_s += 1.5
    add(record, shared + [8] * 100, tenant="key-b", num_output=9)
    clock.now_s += 0.5
    add(record, [9] * 20, tenant="key-a")
    record.close()
    first, second, third = read(path)
    assert [each.arrival_s for each in (first, second, third)] == [0.0, 1.5, 2.0]
    assert [each.num_prompt_tokens for each in (first, second, third)] == [202, 292, 20]
    assert [each.max_tokens for each in (first, second, third)] == [5, 9, 5]
    assert first.tenant == third.tenant != second.tenant and first.priority == 2
    assert first.prompt[: 3 * BLOCK_TOKENS] == second.prompt[: 3 * BLOCK_TOKENS]
    assert first.prompt[3 * BLOCK_TOKENS :] != second.prompt[3 * BLOCK_TOKENS : 202]


def test_nothing_of_a_prompt_or_a_key_can_be_told_from_the_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        record = make_record(path, Clock())
        add(record, [4321] * 200, tenant="secret-key")
        record.close()
    a, b = (path.read_text() for path in paths)
    assert "secret" not in a and "4321" not in a
    hashes = [json.loads(text.splitlines()[1])["hash_ids"] for text in (a, b)]
    assert len(hashes[0]) == 3 and hashes[0] != hashes[1]  # each server has a key of its own
    assert paths[0].stat().st_mode & 0o077 == 0


def test_the_last_hour_is_kept_however_long_a_server_runs(tmp_path: Path) -> None:
    path, clock = tmp_path / "traffic.jsonl", Clock()
    record = make_record(path, clock)
    for _ in range(500):  # more than four hours
        add(record, [5] * 10)
        clock.now_s += 30
    record.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, f"{path.name}.1"]
    requests = read(path)
    assert 3550 <= requests[-1].arrival_s <= 3600


def test_the_file_is_bounded_whatever_comes(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    record = make_record(path, Clock(), max_bytes=5000)
    for _ in range(1000):
        add(record, [5] * 10)
    record.close()
    assert all(each.stat().st_size <= 5000 for each in tmp_path.iterdir())


def test_the_file_of_an_earlier_server_is_kept_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    for _ in range(2):
        record = make_record(path, Clock())
        add(record, [5] * 10)
        record.close()
    assert len(read(path)) == 2


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    record = make_record(path, Clock())
    add(record, [5] * 10)
    record.close()
    with path.open("a") as file:
        file.write('{"timestamp": 1, "inp')
    assert len(read(path)) == 1


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(BadDataset, match="is not a file of penstock serve --record-traffic"):
        read(path)


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--record-traffic .* cannot be written: No such"):
        make_record(tmp_path / "none" / "traffic", Clock())

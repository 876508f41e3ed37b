"""Files of blocks: private, whole or not believed, and shared by several servers."""

import os
import threading
from pathlib import Path

import pytest
import torch

from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.memory.pool.kv_shape import KVHeads, KVShape
from penstock.engine.memory.tiers.block_files import HEADER_BYTES, BlockFiles, Unreadable
from penstock.engine.memory.tiers.pool_bytes import PoolBytes, StepsInFlight
from penstock.scheduler.cache.tier import TierBlock
from penstock.scheduler.errors import InvalidConfig
from tests.scheduler.test_tier import engine
from tests.support.scheduling import make_request
from tests.support.tier_files import files_in
from tests.support.tiered import GIB, IDENTITY, hits, on_disk

BLOCK = TierBlock(1, bytes(range(16)))


def test_files_are_for_their_owner_alone_and_their_names_have_a_secret(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    files = BlockFiles(directory, IDENTITY, GIB)
    files.write(BLOCK, memoryview(b"content"))
    found = [directory, *directory.rglob("*")]
    assert len(found) == 5
    assert not any(path.stat().st_mode & 0o077 for path in found)
    assert BlockFiles(directory, IDENTITY, GIB).key == files.key
    assert BlockFiles(tmp_path / "other", IDENTITY, GIB).key != files.key
    assert BlockFiles(directory, bytes(31) + b"1", GIB).key != files.key


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    BlockFiles(tmp_path, IDENTITY, GIB)
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        BlockFiles(tmp_path, IDENTITY, GIB)


def test_a_block_is_read_for_its_digest_and_group_alone(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, IDENTITY, GIB)
    files.write(BLOCK, memoryview(b"content"))
    assert bytes(files.read(BLOCK, 7)) == b"content"
    other = BLOCK._replace(group=0)
    with pytest.raises(Unreadable, match="missing"):
        files.read(other, 7)
    [path] = files_in(tmp_path)
    path.rename(path.with_suffix(".0"))
    with pytest.raises(Unreadable, match="changed"):
        files.read(other, 7)
    with pytest.raises(Unreadable, match="length"):
        files.read(other, 8)


def test_servers_that_write_and_remove_the_same_blocks_never_read_half_of_one(
    tmp_path: Path,
) -> None:
    content = os.urandom(100_000)
    blocks = [TierBlock(0, bytes([i] * 16)) for i in range(3)]
    wrong: list[str] = []
    num_read = [0]

    def use(server: BlockFiles, number: int) -> None:
        for turn in range(60):
            block = blocks[(turn + number) % 3]
            server.write(block, memoryview(content))
            if turn % 5 == 0:
                server.remove(blocks[turn % 3])
            try:
                num_read[0] += server.read(blocks[turn % 3], len(content)) == content
            except Unreadable as error:
                wrong.extend([str(error)] * (str(error) != "missing"))

    servers = [BlockFiles(tmp_path, IDENTITY, GIB) for _ in range(3)]
    threads = [
        threading.Thread(target=use, args=(server, number)) for number, server in enumerate(servers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and num_read[0] > 0
    assert {path.stat().st_size for path in files_in(tmp_path)} <= {HEADER_BYTES + len(content)}
    assert not list(tmp_path.glob("*/*/.new-*"))


def test_what_a_killed_server_was_writing_is_removed_later(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, IDENTITY, GIB)
    files.write(BLOCK, memoryview(b"content"))
    [path] = files_in(tmp_path)
    old, new = path.parent / ".new-1-a", path.parent / ".new-1-b"
    for unfinished in (old, new):
        unfinished.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert files.tidy() == (HEADER_BYTES + 7, 0)
    assert new.exists() and not old.exists()


def test_a_disk_that_cannot_be_written_stops_writing_and_no_request(tmp_path: Path) -> None:
    driver = engine(tmp_path)
    assert driver.tier
    own = driver.tier._files._own
    own.rmdir()
    own.write_bytes(b"")  # what was a directory is none
    assert hits(driver, make_request("a", 30)) == 0
    assert hits(driver, make_request("b", [9] * 30)) == 0
    assert on_disk(driver).failed_writes_total == 1  # the others were not tried


def test_no_block_is_written_before_the_steps_that_were_launched_with_it_are_computed() -> None:
    layout = KVLayout.of([None], 64)
    ranks = [
        KVPools(KVShape((heads,)), layout, (5,), 4, torch.float32, torch.device("cpu"))
        for heads in (KVHeads(2, 8), KVHeads(1, 8))
    ]
    steps = StepsInFlight()
    memory = PoolBytes(ranks, steps)
    content = memoryview(bytes([1]) * memory.num_bytes(0))
    steps.launch()
    steps.launch()
    memory.reach(0, 3)
    steps.launch()  # a later one does not hold it up
    writer = threading.Thread(target=memory.write, args=(0, 3, content))
    writer.start()
    steps.complete()
    writer.join(0.2)
    assert writer.is_alive() and not any(memory.read(0, 3))
    steps.complete()
    writer.join(30)
    assert memory.read(0, 3) == content
    (keys, values), *_ = ranks[1].groups[0].pairs()
    assert all(tensor[:, 3].all() and not tensor[:, 2].any() for tensor in (keys, values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_blocks_bytes_are_the_same_in_another_place_of_its_pool(dtype: torch.dtype) -> None:
    # Layers of one group whose heads differ, as Gemma 4 has them, and one with latents.
    heads = (KVHeads(2, 8), KVHeads(2, 8), KVHeads(1, 16), KVHeads(2, 8), KVHeads(1, 12, 8))
    shape = KVShape(heads)
    layout = KVLayout.of([None, 4, None, None, None], 64)
    pools = KVPools(shape, layout, (5, 4), 4, dtype, torch.device("cpu"))
    memory = PoolBytes([pools])
    for group, pool in enumerate(pools.groups):
        tensors = [tensor for pair in pool.pairs() for tensor in pair]
        for tensor in tensors:
            tensor.view(torch.uint8).random_()
        before = [tensor.clone() for tensor in tensors]
        content = memory.read(group, 1)
        assert len(content) == memory.num_bytes(group)
        memory.write(group, 3, content)
        for tensor, old in zip(tensors, before, strict=True):
            new_bytes, old_bytes = tensor.view(torch.uint8), old.view(torch.uint8)
            assert torch.equal(new_bytes[:, 3], old_bytes[:, 1])
            assert torch.equal(new_bytes[:, :3], old_bytes[:, :3])

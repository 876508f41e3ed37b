"""`HostTier`: blocks of a device's pool in the host's memory, and beneath it on a disk.

A block that is stored is gathered into one piece, with a checksum that the device computes from
what its pool has, and copied to a slot of the host's memory. The block that was used least recently
gives way. With a disk beneath (`DiskTier`), each piece goes to a file too, in the background; a
block that only the disk has is read into a slot first, and then loaded like any other. The device
computes the checksum of a loaded piece again, before a byte of it gets into the pool: whatever
changed on the way, in memory, in a file or on a bus, is found.

What moves bytes is a `BlockMover`. One thread gathers, another one scatters, and both wait for the
device, so that the engine's thread never does. The lock is held for bookkeeping, and while a gather
is launched: `withdraw` must know whether it was.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.engine.memory.tiers.disk_tier import DiskTier, TransferRate
from penstock.engine.memory.tiers.host_pieces import HostPieces
from penstock.scheduler.cache.prefix import PROCESS_KEY
from penstock.scheduler.cache.tier import Loaded, TierBlock
from penstock.scheduler.stats import PlaceStats, TierStats, plus

logger = logging.getLogger(__name__)

# When the process is about to end, it waits so long for blocks to reach the disk.
_FLUSH_S = 5.0
_LOOK_S = 0.01
# While all slots are in use, how often it is looked for a free one.
_SLOT_S = 0.05


class Move(NamedTuple):
    """Between a block of the pool and a slot. seed: of the checksum, so that a piece is not taken
    for one of other tokens."""

    block_id: int
    slot: int
    seed: int


class Transfer(Protocol):
    """On its way."""

    def wait(self) -> list[int]:
        """The checksums of its pieces, once it has ended."""
        ...

    @property
    def seconds(self) -> float:
        """Its own duration, once it has ended."""
        ...


class BlockMover(Protocol):
    """Copies blocks of one group at a time, beside the steps of a device, which may run ahead.
    Only `fence` and `hold` are for the thread that launches steps alone."""

    def most_blocks(self, group: int) -> int:
        """So many may be moved at once."""
        ...

    def fence(self) -> Any:
        """A mark after all that has been launched until now."""
        ...

    def gather(self, group: int, moves: Sequence[Move]) -> Transfer:
        """Begins to copy blocks to slots. The steps that wrote to the blocks have completed."""
        ...

    def hold(self, gathering: Any) -> None:
        """Launches from now on wait until the blocks of what `gather` has begun have been read."""
        ...

    def scatter(
        self, group: int, moves: Sequence[Move], checksums: Sequence[int], fences: Sequence[Any]
    ) -> Transfer:
        """Begins to copy slots to blocks, after what was launched before these fences: those pieces
        that have these checksums."""
        ...


@dataclass(slots=True, eq=False)
class _Piece:
    """In a slot. num_pins: of the loads that need it. Without a block, it is to be freed."""

    slot: int
    is_from_disk: bool = False
    num_pins: int = 0
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    """piece: None while it is not in memory. is_taken: it cannot be cancelled any more."""

    block: TierBlock
    block_id: int
    fence: Any
    piece: _Piece | None = None
    was_in_memory: bool = False
    is_taken: bool = False
    is_intact: bool = False
    is_cancelled: bool = False
    is_forgotten: bool = False


@dataclass(slots=True, eq=False)
class _Gathering:
    """blocks: by where they are in the pool, in the order of their slots."""

    group: int
    blocks: dict[int, TierBlock]
    slots: list[int]
    transfer: Transfer
    started_s: float
    is_held: bool = False
    forgotten: set[TierBlock] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Scattering:
    loads: list[_Load]
    checksums: list[int]
    transfer: Transfer


class HostTier:
    """See `penstock.scheduler.cache.tier.BlockTier`."""

    def __init__(
        self,
        mover: BlockMover,
        pieces: HostPieces,
        read_bytes_per_s: float,
        disk: DiskTier | None = None,
        *,
        has_threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """read_bytes_per_s: to the device, as measured at the start. disk: of blocks that are slots
        of these pieces. has_threads: else `work` does what they would."""
        self._mover = mover
        self._pieces = pieces
        self._disk = disk
        self.key = PROCESS_KEY if disk is None else disk.key
        self._clock = clock
        groups = range(pieces.num_groups)
        self._free: list[deque[int]] = [deque(range(num)) for num in pieces.num_grown]
        # The least recently used first.
        self._ready: list[OrderedDict[TierBlock, _Piece]] = [OrderedDict() for _ in groups]
        # Stored, and not gathered yet: by block of the pool.
        self._pending: list[dict[int, TierBlock]] = [{} for _ in groups]
        self._next_group = 0  # whose turn it is
        self._gathering: _Gathering | None = None
        self._scattering: _Scattering | None = None
        self._loads: dict[TierBlock, _Load] = {}
        self._reading: dict[TierBlock, int] = {}  # from the disk, to these slots
        self._queued: deque[_Load] = deque()
        self._ended: list[_Load] = []
        self.rate = TransferRate(read_bytes_per_s)
        self._counts = PlaceStats()
        self._lock = threading.Lock()
        self._is_stored = threading.Condition(self._lock)
        self._is_queued = threading.Condition(self._lock)
        if has_threads:
            for name, run, arguments in (
                ("grow", self._grow, ()),
                ("stores", _run, (self.begin_stores, self.end_stores)),
                ("loads", _run, (self.begin_loads, self.end_loads)),
            ):
                name = f"kv-offload-{name}"
                threading.Thread(target=run, args=arguments, name=name, daemon=True).start()
        else:
            self._grow()

    def __contains__(self, block: TierBlock) -> bool:
        return block in self._ready[block.group] or self._is_on_disk(block)

    def store(self, block: TierBlock, block_id: int) -> None:
        with self._lock:
            piece = self._ready[block.group].get(block)
            if piece is None:
                gathering = self._gathering
                if gathering is None or block not in gathering.blocks.values():
                    self._pending[block.group][block_id] = block
                    self._is_stored.notify()
                return
            self._ready[block.group].move_to_end(block)
            if self._disk is not None:
                self._disk.store(block, piece.slot)

    def withdraw(self, group: int, block_id: int) -> None:
        with self._lock:
            if self._pending[group].pop(block_id, None) is not None:
                self._count(unwritten_blocks_total=1)
                return
            gathering = self._gathering
            if gathering is None or gathering.is_held or gathering.group != group:
                return
            if block_id in gathering.blocks:
                self._mover.hold(gathering.transfer)
                gathering.is_held = True

    def forget(self, block: TierBlock) -> None:
        with self._lock:
            self._drop(block)
            pending = self._pending[block.group]
            for block_id in [place for place, each in pending.items() if each == block]:
                del pending[block_id]
            if self._gathering is not None:
                self._gathering.forgotten.add(block)
            if (load := self._loads.get(block)) is not None:
                load.is_forgotten = True
            if self._disk is not None:
                self._disk.forget(block)

    def load(self, block_ids: Mapping[TierBlock, int]) -> None:
        fence = self._mover.fence()
        with self._lock:
            absent = []
            for block, block_id in block_ids.items():
                load = self._loads[block] = _Load(block, block_id, fence)
                self.rate.open_bytes += self._pieces.piece_bytes(block.group)
                piece = self._ready[block.group].get(block)
                if piece is None:
                    absent.append(load)
                else:
                    load.was_in_memory = True
                    self._queue(load, piece)
            # Last, so that no slot is taken from one of the others.
            self._read(absent)

    def loaded(self) -> Iterable[Loaded]:
        with self._lock:
            for block, is_intact in self._disk.loaded() if self._disk is not None else ():
                self._on_read(block, is_intact=is_intact)
            ended, self._ended = self._ended, []
            found = []
            for load in ended:
                self._remove(load)
                is_intact = load.is_intact and not load.is_forgotten
                self._count(hit_blocks_total=is_intact and load.was_in_memory)
                found.append(Loaded(load.block, is_intact))
            return found

    def cancel(self, block: TierBlock) -> bool:
        with self._lock:
            load = self._loads[block]
            if load.is_taken:
                return False
            load.is_cancelled = True
            self._remove(load)
            if load.piece is not None:
                self._unpin(block.group, load.piece)
            elif self._disk is not None and self._disk.cancel(block):
                self._free[block.group].append(self._reading.pop(block))
            return True

    def load_s(self, blocks: Sequence[TierBlock]) -> float:
        on_disk = [
            block
            for block in blocks
            if block not in self._ready[block.group] and self._is_on_disk(block)
        ]
        num_bytes = sum(self._pieces.piece_bytes(block.group) for block in blocks)
        seconds = self.rate.seconds(num_bytes)
        if on_disk and self._disk is not None:
            seconds += self._disk.load_s(on_disk)
        return seconds

    def decline(self) -> None:
        with self._lock:
            self.rate.decline()
        if self._disk is not None:
            self._disk.decline()

    def flush(self) -> None:
        if self._disk is None:
            return
        ends_s = time.monotonic() + _FLUSH_S
        while (self._gathering or any(self._pending)) and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
        self._disk.flush()

    def stats(self) -> TierStats:
        pairs = zip(self._pieces.num_grown, self._free, strict=True)
        used = [num - len(free) for num, free in pairs]
        memory = self._counts._replace(
            num_blocks=sum(map(len, self._ready)),
            num_bytes=sum(num * self._pieces.piece_bytes(group) for group, num in enumerate(used)),
        )
        return TierStats(memory, None if self._disk is None else self._disk.place_stats())

    def work(self) -> None:
        """Does all that the threads would have done by now, where there are none."""
        is_busy = True
        while is_busy:
            self.end_stores()
            self.end_loads()
            is_busy = self.begin_stores() or self.begin_loads()
        if self._disk is not None:
            self._disk.work()

    # Called by threads, or by whoever steps a tier that has none.

    def _grow(self) -> None:
        try:
            while made := self._pieces.grow():
                with self._lock:
                    for free, slots in zip(self._free, made, strict=True):
                        free.extend(slots)
        except RuntimeError as error:
            logger.warning(
                "--kv-offload-gb: of %d blocks that the host's memory was to have room for, it has "
                "room for %d, as no more of it can be pinned: %s",
                sum(self._pieces.num_slots),
                sum(self._pieces.num_grown),
                error,
            )

    def begin_stores(self, *, waits: bool = False) -> bool:
        """Begins to gather blocks, if there are any, and none are being gathered."""
        if self._gathering is not None:
            return False
        with self._lock:
            while not (blocks := self._next_stores()):
                if not waits:
                    return False
                self._is_stored.wait(_SLOT_S if any(self._pending) else None)
            group = next(iter(blocks.values()))[0].group
            moves = [
                Move(block_id, slot, _seed(block)) for block_id, (block, slot) in blocks.items()
            ]
            self._gathering = _Gathering(
                group,
                {block_id: block for block_id, (block, _) in blocks.items()},
                [move.slot for move in moves],
                self._mover.gather(group, moves),
                self._clock(),
            )
            return True

    def _next_stores(self) -> dict[int, tuple[TierBlock, int]]:
        """As many of one group as may be moved at once and have slots, which are theirs now."""
        found: dict[int, tuple[TierBlock, int]] = {}
        for _ in self._pending:
            group = self._next_group
            self._next_group = (group + 1) % len(self._pending)
            pending = self._pending[group]
            for block_id in list(pending)[: self._mover.most_blocks(group)]:
                if (slot := self._take(group)) is None:
                    break
                found[block_id] = pending.pop(block_id), slot
            if found:
                break
        return found

    def end_stores(self) -> None:
        if (gathering := self._gathering) is None:
            return
        checksums = gathering.transfer.wait()
        with self._lock:
            self._gathering = None
            group, seconds = gathering.group, self._clock() - gathering.started_s
            blocks = gathering.blocks.values()
            for block, slot, checksum in zip(blocks, gathering.slots, checksums, strict=True):
                if block in gathering.forgotten or block in self._ready[group]:
                    self._free[group].append(slot)
                    continue
                self._pieces.checksums[group][slot] = checksum
                self._ready[group][block] = _Piece(slot)
                if self._disk is not None:
                    self._disk.store(block, slot)
            num_bytes = len(blocks) * self._pieces.piece_bytes(group)
            self._count(written_bytes_total=num_bytes, write_s_total=seconds)

    def begin_loads(self, *, waits: bool = False) -> bool:
        """Begins to scatter blocks, if there are any, and none are being scattered."""
        if self._scattering is not None:
            return False
        with self._lock:
            while not (loads := self._next_loads()):
                if not waits:
                    return False
                self._is_queued.wait()
            group, moves, checksums = loads[0].block.group, [], []
            for load in loads:
                assert load.piece, load
                slot = load.piece.slot
                moves.append(Move(load.block_id, slot, _seed(load.block)))
                checksums.append(self._pieces.checksums[group][slot])
        # Its slots are pinned, and its blocks nobody else's until it has ended.
        transfer = self._mover.scatter(group, moves, checksums, [load.fence for load in loads])
        self._scattering = _Scattering(loads, checksums, transfer)
        return True

    def _next_loads(self) -> list[_Load]:
        """As many of one group as may be moved at once. They cannot be cancelled any more."""
        loads: list[_Load] = []
        while self._queued:
            load = self._queued[0]
            group = load.block.group
            if not load.is_cancelled:
                if loads and loads[0].block.group != group:
                    break
                if len(loads) == self._mover.most_blocks(group):
                    break
                load.is_taken = True
                loads.append(load)
            self._queued.popleft()
        return loads

    def end_loads(self) -> None:
        if (scattering := self._scattering) is None:
            return
        found = scattering.transfer.wait()
        with self._lock:
            self._scattering = None
            loads, seconds = scattering.loads, scattering.transfer.seconds
            num_bytes = len(loads) * self._pieces.piece_bytes(loads[0].block.group)
            self.rate.measure(num_bytes, seconds)
            self._count(read_bytes_total=num_bytes, read_s_total=seconds)
            for load, checksum, expected in zip(loads, found, scattering.checksums, strict=True):
                load.is_intact = checksum == expected
                if not load.is_intact:
                    self._on_damage(load)
                assert load.piece, load
                self._unpin(load.block.group, load.piece)
                self._ended.append(load)

    # Under the lock.

    def _is_on_disk(self, block: TierBlock) -> bool:
        return self._disk is not None and block in self._disk

    def _take(self, group: int) -> int | None:
        """A free slot, or that of the block which was used least recently; None where all are in
        use."""
        if self._free[group]:
            return self._free[group].popleft()
        for block, piece in self._ready[group].items():
            if not piece.num_pins:
                del self._ready[group][block]
                if self._disk is not None:
                    self._disk.withdraw(group, piece.slot)
                self._count(removed_blocks_total=1)
                return piece.slot
        return None

    def _drop(self, block: TierBlock) -> None:
        piece = self._ready[block.group].pop(block, None)
        if piece is None:
            return
        if self._disk is not None:
            self._disk.withdraw(block.group, piece.slot)
        piece.is_dropped = True
        if not piece.num_pins:
            self._free[block.group].append(piece.slot)

    def _unpin(self, group: int, piece: _Piece) -> None:
        piece.num_pins -= 1
        if piece.is_dropped and not piece.num_pins:
            self._free[group].append(piece.slot)

    def _queue(self, load: _Load, piece: _Piece) -> None:
        load.piece = piece
        piece.num_pins += 1
        self._ready[load.block.group].move_to_end(load.block)
        self._queued.append(load)
        self._is_queued.notify()

    def _read(self, loads: list[_Load]) -> None:
        slots: dict[TierBlock, int] = {}
        for load in loads:
            block = load.block
            if block in self._reading:
                continue  # for a load that was cancelled too late
            slot = self._take(block.group) if self._is_on_disk(block) else None
            if slot is None:
                self._fail(load)
            else:
                slots[block] = self._reading[block] = slot
        if slots and self._disk is not None:
            self._disk.load(slots)

    def _on_read(self, block: TierBlock, *, is_intact: bool) -> None:
        """The disk's part of a load has ended."""
        slot, ready = self._reading.pop(block), self._ready[block.group]
        if is_intact and block not in ready:
            ready[block] = _Piece(slot, is_from_disk=True)
        else:
            self._free[block.group].append(slot)
        load = self._loads.get(block)
        if load is None or load.piece is not None or load.is_taken:
            return
        if (piece := ready.get(block)) is not None:
            self._queue(load, piece)
        else:
            self._fail(load)

    def _on_damage(self, load: _Load) -> None:
        assert load.piece, load
        self._count(damaged_blocks_total=1)
        logger.warning(
            "a block of keys and values in the host's memory has changed; it is computed again"
        )
        if self._ready[load.block.group].get(load.block) is load.piece:
            self._drop(load.block)
        if load.piece.is_from_disk and self._disk is not None:
            self._disk.forget(load.block)

    def _fail(self, load: _Load) -> None:
        load.is_taken = True
        self._ended.append(load)

    def _remove(self, load: _Load) -> None:
        del self._loads[load.block]
        self.rate.open_bytes -= self._pieces.piece_bytes(load.block.group)

    def _count(self, **more: float) -> None:
        self._counts = plus(self._counts, **more)


def _run(begin: Callable[..., bool], end: Callable[[], None]) -> None:
    """Until an error, which is logged; loads that never end are given up."""
    try:
        while True:
            begin(waits=True)
            end()
    except Exception:
        logger.exception("no more blocks go to the host's memory, or come from there")


def _seed(block: TierBlock) -> int:
    return int.from_bytes(block.digest[:8], "little", signed=True) ^ block.group

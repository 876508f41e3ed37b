"""Finds full blocks by their content, and says which evictable block is evicted first.

A block's digest is chained over its tokens and its parent's digest, back to salt and adapter, so
equal digests mean equal tokens at equal positions under an equal salt and adapter. It is a 128-bit
BLAKE2 with a key that each process draws for itself: nobody can prepare two prompts whose digests
collide, so a hit needs no comparison of tokens. (A 64-bit hash would: vLLM moved to SHA-256 for
that reason.)

Evictable blocks are evicted in least-recently-used order. A sequence releases its last block first,
so a block is always evicted before its parent, and every cached block can be found from the root.
"""

import os
from array import array
from collections import OrderedDict
from hashlib import blake2b

DIGEST_BYTES = 16
_KEY = os.urandom(16)


def root_digest(salt: str, adapter: str | None) -> bytes:
    """The parent of first blocks. Different salts share nothing, nor do different adapters: theirs
    are other keys and values."""
    # The repr of a pair is never that of another pair, and has no lone surrogates.
    content = repr((salt, adapter)).encode()
    return blake2b(content, digest_size=DIGEST_BYTES, key=_KEY).digest()


def block_digest(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of a full block with these tokens behind the block named `parent`."""
    content = parent + array("q", token_ids).tobytes()
    return blake2b(content, digest_size=DIGEST_BYTES, key=_KEY).digest()


class PrefixIndex:
    """Names to blocks, and the idle blocks from the longest idle to the latest."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def add(self, name: bytes, block_id: int) -> None:
        """Makes a held block findable, unless another block has its name already.

        A second block with the same content stays anonymous, so block tables only ever grow.
        """
        if name not in self._block_of and block_id not in self._name_of:
            self._block_of[name] = block_id
            self._name_of[block_id] = name

    def has(self, block_id: int) -> bool:
        return block_id in self._name_of

    def is_idle(self, block_id: int) -> bool:
        return block_id in self._idle

    def rest(self, block_id: int) -> None:
        """A findable block lost its last holder: idle from now on."""
        self._idle[block_id] = None

    def wake(self, block_id: int) -> None:
        """A block that may be idle is held again."""
        self._idle.pop(block_id, None)

    def forget_oldest(self) -> int | None:
        """The block that has been idle longest, no longer findable; None where none is idle."""
        if not self._idle:
            return None
        block_id, _ = self._idle.popitem(last=False)
        del self._block_of[self._name_of.pop(block_id)]
        return block_id

"""Digests of blocks: the same in one piece and in several, and the same in every release."""

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.cache.prefix import block_digests, root_digest

KEY = b"0123456789abcdef"


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=40),
    block_size=st.integers(1, 16),
    num_first=st.integers(0, 40),
)
def test_blocks_have_the_same_digests_together_and_one_after_the_other(
    token_ids: list[int], block_size: int, num_first: int
) -> None:
    root = root_digest("", None, KEY)
    digests = block_digests(root, token_ids, block_size, KEY)
    assert len(digests) == len(token_ids) // block_size
    end = min(num_first, len(digests)) * block_size
    first = block_digests(root, token_ids[:end], block_size, KEY)
    parent = first[-1] if first else root
    assert first + block_digests(parent, token_ids[end:], block_size, KEY) == digests


def test_a_digest_is_of_the_parent_and_the_ids_as_four_bytes_each() -> None:
    """What earlier engines kept in files is found by it."""
    parent = bytes(16)
    content = parent + b"".join(each.to_bytes(4, "little") for each in (1, 2, 128_000))
    expected = blake2b(content, digest_size=16, key=KEY).digest()
    assert block_digests(parent, (1, 2, 128_000), 3, KEY) == [expected]

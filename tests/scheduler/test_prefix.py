"""Digests of blocks: the same in one piece and in several, and the same in every release."""

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.cache.prefix import block_digests, root_digest
from penstock.scheduler.types import Insert

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


def image(start: int, name: bytes, num_tokens: int = 5) -> Insert:
    return Insert(start, num_tokens, name * 16, (1, 1, num_tokens))


@given(num_first=st.integers(0, 5), inserts=st.sampled_from([(3,), (0, 8), (4, 14)]))
def test_blocks_with_inserts_have_the_same_digests_together_and_one_after_the_other(
    num_first: int, inserts: tuple[int, ...]
) -> None:
    images = tuple(image(start, b"a") for start in inserts)
    ids, root = [7] * 20, root_digest("", None, KEY)
    digests = block_digests(root, ids, 4, KEY, images)
    first = digests[:num_first]
    rest = ids[num_first * 4 :]
    parent = first[-1] if first else root
    assert first + block_digests(parent, rest, 4, KEY, images, num_first * 4) == digests


def test_a_block_with_placeholders_is_found_by_what_they_show_and_where_that_begins() -> None:
    ids, root = [7] * 12, root_digest("", None, KEY)
    text = block_digests(root, ids, 4, KEY)
    given_inserts = [(image(5, b"a"),), (image(5, b"b"),), (image(4, b"a"),), (image(0, b"a"),)]
    found = [block_digests(root, ids, 4, KEY, each) for each in given_inserts]
    assert [each[0] == text[0] for each in found] == [True, True, True, False]
    assert len({each[1] for each in found} | {text[1]}) == 5
    # The same image twice, and one image with a longer one's tokens.
    twice = block_digests(root, ids, 4, KEY, (image(0, b"a", 2), image(2, b"a", 2)))
    once = block_digests(root, ids, 4, KEY, (image(0, b"a", 4),))
    assert twice[0] != once[0]

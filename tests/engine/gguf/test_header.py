"""A file that is damaged, or made to do harm, is one clear error: no crash, no memory."""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.file import open_gguf, split_names
from penstock.engine.files.gguf.header import parse_header
from penstock.engine.hub.gguf import check_gguf
from tests.support.gguf_files import write_gguf
from tests.support.paths import DEMO_MODEL
from tests.support.tiny_models import make_model

MAX_BYTES = 2**24


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    model = make_model("llama2", num_hidden_layers=1, vocab_size=20)
    return write_gguf(path, model).read_bytes()


def error_of(directory: Path, content: bytes) -> str | None:
    """None where it passes the check; asserts that little memory is used in either case."""
    # What was read of a path is kept while its time is the same, which is coarse.
    path = directory / f"{len(list(directory.iterdir()))}.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        check_gguf(path)
        error = None
    except InvalidModel as refusal:
        error = str(refusal)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_BYTES
    assert error is None or error.startswith(str(path))
    return error


def test_the_header_is_as_it_was_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("llama2"), tokenizer=DEMO_MODEL)
    gguf = open_gguf(path)
    assert gguf.metadata["general.architecture"] == "llama"
    assert gguf.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert gguf.metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert gguf.tensors["blk.2.ffn_down.weight"].shape == (64, 112)
    assert gguf.tensors["blk.2.ffn_down.weight"].type.name == "F32"


def test_wherever_a_file_ends_it_is_said_to_be_incomplete(tmp_path: Path, content: bytes) -> None:
    for end in [*range(1, 20), *range(20, len(content), 331), len(content) - 1]:
        error = error_of(tmp_path, content[:end])
        assert error and ("not complete" in error or "not a GGUF file" in error), error
    assert error_of(tmp_path, content) is None


def test_flipped_bits_are_refused_or_change_nothing_but_names_and_numbers(
    tmp_path: Path, content: bytes
) -> None:
    generator = random.Random(0)
    header_bytes = content.index(b"blk.0.ffn_norm.weight") + 64
    num_refused = 0
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 1, 8))):
            changed[generator.randrange(header_bytes)] ^= 1 << generator.randrange(8)
        num_refused += error_of(tmp_path, bytes(changed)) is not None
    assert 100 < num_refused < 400


def test_bytes_that_are_replaced_by_extremes_are_refused(tmp_path: Path, content: bytes) -> None:
    """Counts, lengths and sizes, wherever they are in the header."""
    header_bytes = content.index(b"blk.0.ffn_norm.weight") + 64
    num_refused = 0
    for value in (2**64 - 1, 2**31 - 1):
        for place in range(8, header_bytes - 8, 11):
            changed = bytearray(content)
            changed[place : place + 8] = struct.pack("<Q", value)
            num_refused += error_of(tmp_path, bytes(changed)) is not None
    assert num_refused > 200


def header(*entries: bytes, num_tensors: int = 0, tensors: bytes = b"", version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, num_tensors, len(entries))
    return b"GGUF" + counts + b"".join(entries) + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"PK\3\4 something else", "is not a GGUF file"),
        (header(version=1), "version 1 of the format, which is not supported"),
        (header(version=3 << 24), "big-endian numbers, which is not supported"),
        (header(num_tensors=2**40), "says that it has 1,099,511,627,776 of what may be"),
        (header(entry("a", 9, struct.pack("<IQ", 8, 2**24))), "ends within its header"),
        (header(entry("a", 9, struct.pack("<IQ", 0, 2**62))), "of what may be 16,777,216 at most"),
        (header(entry("a", 9, struct.pack("<IQ", 9, 1))), "metadata of the unknown type 9"),
        (header(entry("a", 8, struct.pack("<Q", 2**62))), "ends within its header"),
        (header(entry("a", 13, b"")), "metadata of the unknown type 13"),
        (header(text("\n") + b"\xff" * 4), "unknown type 4294967295"),
        (header(struct.pack("<Q", 1) + b"\xff"), "a name that is not UTF-8"),
        (header(entry("general.alignment", 4, b"\0" * 4)), "has the alignment 0"),
        (header(entry("general.alignment", 4, b"\7\0\0\0")), "has the alignment 7"),
        (
            header(num_tensors=1, tensors=tensor("a", (32, 2**62), 0)),
            "its tensor 'a' ends at byte 590,295,810,358,705,651,808",
        ),
        (header(num_tensors=1, tensors=tensor("a", (33,), 8)), "of the impossible shape (33,)"),
        (header(num_tensors=1, tensors=tensor("a", (0,), 0)), "of the impossible shape (0,)"),
        (header(num_tensors=1, tensors=tensor("a", (1,) * 9, 0)), "of 9 dimensions"),
        (
            header(num_tensors=1, tensors=tensor("a", (4,), 0, offset=3), version=2) + b"\0" * 99,
            "at the odd place",
        ),
        (
            header(num_tensors=2, tensors=tensor("a", (4,), 0) * 2),
            "has two tensors 'a'",
        ),
        (
            header(num_tensors=2, tensors=tensor("a", (9,), 0) + tensor("b", (9,), 0, offset=32))
            + b"\0" * 199,
            "has the tensor 'b' within the bytes of another",
        ),
        (header(entry("a", 4, b"\0" * 4), entry("a", 4, b"\0" * 4)), "has two fields 'a'"),
        (
            header(num_tensors=1, tensors=tensor("a", (256,), 15)),
            "has its tensor 'a' in the type Q8_K, which is not supported; supported are F32, F16",
        ),
        (
            header(num_tensors=1, tensors=tensor("a", (256,), 99)),
            "in the type of the number 99, which is not supported",
        ),
    ],
)
def test_what_is_wrong_is_named(content: bytes, expected: str) -> None:
    with pytest.raises(InvalidModel) as refused:
        parse_header("a.gguf", memoryview(content), len(content))
    assert expected in str(refused.value)
    assert str(refused.value).startswith("a.gguf ")


def test_the_parts_of_a_split_file_are_known_by_any_of_their_names() -> None:
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert split_names(names[0]) == split_names(names[1]) == names
    assert split_names("m.gguf") == ["m.gguf"]
    assert split_names("m-00001-of-00000.gguf") == ["m-00001-of-00000.gguf"]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"a\.gguf does not exist; check the path"):
        open_gguf(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(InvalidModel, match=r"a\.gguf is empty"):
        open_gguf(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").symlink_to("/dev/zero")
    with pytest.raises(InvalidModel, match=r"b\.gguf is not a regular file"):
        open_gguf(tmp_path / "b.gguf")

"""`python -m tests.fuzz.files`: damaged GGUF and tokenizer.json files, read as a server would.

Each is refused by a clear error or read to the end: no signal, no other exception, no memory
without limit, no wait. They are read in a process of its own, whose end is found and told with the
file's number, which is the seed of the damage: --first NUMBER --num 1 repeats it.
"""

import argparse
import json
import multiprocessing as mp
import os
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.engine.hub.gguf import check_gguf
from penstock.scheduler.errors import PenstockError
from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.gguf_files import load_transformers, write_gguf
from tests.support.paths import DEMO_MODEL
from tests.support.tiny_models import make_model

# Above what the process maps before the first file.
MAX_BYTES = 1 << 30
MAX_S = 10.0
_TEXT = "Once upon a time, in 1984, Zoë said: \u201c\U0001f600 <|im_start|> {}\u201d\n\n"
_INTEGERS = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, "", "a", "\udcff", "\0", "ÿ" * 4096, "(" * 99, "(a+)+$", "[", -1, 0, 1, 2**31),
    *(2**63, 2**64, 1e308, [], {}, [[]], [None], {"type": "Split"}, {"type": "Sequence"}),
)


def main(argv: list[str]) -> int:
    """0 where every file was refused or read."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.files", description=__doc__)
    parser.add_argument("--num", type=int, default=10_000, help="files of each kind")
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args(argv)
    problems = []
    for kind in KINDS:
        found, num_refused = fuzz(kind, range(args.first, args.first + args.num))
        print(f"{kind}: {args.num} files, {num_refused} refused, {len(found)} problems", flush=True)
        problems += found
    print("\n".join(problems))
    return 1 if problems else 0


def fuzz(kind: str, numbers: range) -> tuple[list[str], int]:
    """What went wrong, by the file's number; and how many were refused."""
    problems, num_refused, left = [], 0, list(numbers)
    while left:
        ours, theirs = mp.get_context("spawn").Pipe(duplex=False)
        reader = mp.get_context("spawn").Process(target=_read_all, args=(kind, left, theirs))
        reader.start()
        theirs.close()
        ended = ""
        try:
            ours.recv()  # it has begun
            while left:
                if not ours.poll(MAX_S):
                    ended = f"took more than {MAX_S:.0f} s"
                    break
                problem, is_refused = ours.recv()
                num_refused += is_refused
                number = left.pop(0)
                if problem:
                    problems.append(f"{kind} {number}: {problem}")
        except EOFError:
            reader.join()
            ended = f"its process ended with {reader.exitcode}"
        reader.kill()
        reader.join()
        if ended:
            problems.append(f"{kind} {left.pop(0)}: {ended}")
    return problems, num_refused


def _read_all(kind: str, numbers: list[int], results: Connection) -> None:
    """In a process of its own: tells of each file what is wrong, or that it was refused."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics of Rust are told as exceptions
    original, damaged, read = KINDS[kind]()
    with tempfile.TemporaryDirectory() as scratch:
        read(original, Path(scratch))  # what it takes is mapped
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        results.send(None)
        for number in numbers:
            try:
                read(damaged(original, random.Random(number)), Path(scratch))
                results.send((None, False))
            except PenstockError as error:
                text = str(error)
                is_clear = scratch in text and len(text) < 2000
                results.send((None if is_clear else f"an unclear error: {text[:300]!r}", True))
            except BaseException as error:
                results.send((f"{type(error).__name__}: {str(error)[:300]}", False))


def _gguf(family: str | None = None) -> "Kind":
    """family: of a tiny model; the demo model by default."""
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(family, vocab_size=2048) if family else load_transformers(DEMO_MODEL)
        whole = write_gguf(Path(scratch, "m.gguf"), model, tokenizer=DEMO_MODEL).read_bytes()
    counter = iter(range(10**9))

    def read(content: bytes, scratch: Path) -> None:
        # What was read of a path is kept while its time is the same, which is coarse.
        path = scratch / f"model-{next(counter)}.gguf"
        path.write_bytes(content)
        try:
            check_gguf(path)
            _use(PromptEncoder.load(path, None))
        finally:
            path.unlink()

    # The weights are no more than numbers: the damage is to what stands before them.
    return whole, lambda content, chosen: _damaged_bytes(content, chosen, 300_000), read


def _tokenizer() -> "Kind":
    def read(content: bytes, scratch: Path) -> None:
        (scratch / "tokenizer.json").write_bytes(content)
        _use(PromptEncoder.load(scratch, None))

    return (DEMO_MODEL / "tokenizer.json").read_bytes(), _damaged_json, read


Kind = tuple[bytes, Callable[[bytes, random.Random], bytes], Callable[[bytes, Path], None]]
KINDS: dict[str, Callable[[], Kind]] = {
    "gguf": _gguf,
    "gguf-gemma4": partial(_gguf, "gemma4_moe"),  # which has settings by layer
    "tokenizer.json": _tokenizer,
}


def _use(encoder: PromptEncoder) -> None:
    """As requests would."""
    ids = encoder.encode(_TEXT)
    encoder.token_names(ids[:50])
    encoder.encode_within("word")


def _damaged_bytes(content: bytes, chosen: random.Random, end: int) -> bytes:
    changed = bytearray(content)
    end = min(end, len(changed))
    for _ in range(chosen.choice((1, 1, 1, 2, 5, 20))):
        # Most of the fields are at the beginning.
        at = chosen.randrange(min(chosen.choice((64, 4096, end)), max(1, len(changed) - 1)))
        match chosen.randrange(5):
            case 0:
                changed[at : at + 1] = bytes((chosen.randrange(256),))
            case 1:
                size = chosen.choice((4, 8))
                number = chosen.choice(_INTEGERS) % 256**size
                changed[at : at + size] = number.to_bytes(size, "little")
            case 2:
                del changed[at : at + chosen.randrange(1, 64)]
            case 3:
                changed[at:at] = changed[at : at + chosen.randrange(1, 64)]
            case _:
                if chosen.random() < 0.2:
                    del changed[at:]
    return bytes(changed)


def _damaged_json(content: bytes, chosen: random.Random) -> bytes:
    if chosen.random() < 0.3:
        return _damaged_bytes(content, chosen, len(content))
    tree = json.loads(content)
    for _ in range(chosen.choice((1, 1, 2, 4))):
        holders = list(_holders(tree))
        # Vocabularies are long: as often anywhere else.
        small = [holder for holder in holders if len(holder) < 30]
        holder = chosen.choice(chosen.choice((holders, small)))
        key = chosen.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match chosen.randrange(4):
            case 0:
                del holder[key]
            case 1:
                holder[key] = chosen.choice(holders)  # perhaps itself, with all that it holds
                try:
                    json.dumps(tree)
                except ValueError:
                    holder[key] = None
            case _:
                holder[key] = chosen.choice(_VALUES)
    return json.dumps(tree, ensure_ascii=chosen.random() < 0.5).encode("utf-8", "surrogatepass")


def _holders(tree: Any) -> Iterator[Any]:
    """The objects and lists within that are not empty."""
    if isinstance(tree, dict | list) and tree:
        yield tree
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _holders(each)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.fuzz.files`: damaged files of models, read as a server would.

Each is refused by a clear error or read to the end: no signal, no other exception, no memory
without limit, no wait. They are read in a process of its own, whose end is found and told with the
file's number, which is the seed of the damage: --kind KIND --first NUMBER --num 1 repeats it.
"""

import argparse
import multiprocessing as mp
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from penstock.engine.hub.gguf import check_gguf
from penstock.scheduler.errors import PenstockError
from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.damage import copy_with, damaged, damaged_bytes, damaged_json, files_of
from tests.support.gguf_files import load_transformers, write_gguf
from tests.support.paths import DEMO_MODEL
from tests.support.starts import CHECKPOINTS, start
from tests.support.tiny_models import make_model

# Above what the process maps before the first file.
MAX_BYTES = 1 << 30
MAX_S = 10.0
_TEXT = "Once upon a time, in 1984, Zoë said: \u201c\U0001f600 <|im_start|> {}\u201d\n\n"


def main(argv: list[str]) -> int:
    """0 where every file was refused or read."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.files", description=__doc__)
    parser.add_argument("--num", type=int, default=10_000, help="files of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="by default all")
    args = parser.parse_args(argv)
    problems = []
    for kind in args.kind or KINDS:
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
    with tempfile.TemporaryDirectory() as scratch:
        read = KINDS[kind](Path(scratch))
        read(None)  # what it takes is mapped
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        results.send(None)
        for number in numbers:
            try:
                read(random.Random(number))
                results.send((None, False))
            except PenstockError as error:
                text = str(error)
                is_clear = scratch in text and len(text) < 2000
                results.send((None if is_clear else f"an unclear error: {text[:300]!r}", True))
            except BaseException as error:
                results.send((f"{type(error).__name__}: {str(error)[:300]}", False))


# Reads a model whose files are damaged by what is chosen; None for a whole one.
Read = Callable[[random.Random | None], None]


def _gguf(scratch: Path, family: str | None = None) -> Read:
    """family: of a tiny model; the demo model by default."""
    model = make_model(family, vocab_size=2048) if family else load_transformers(DEMO_MODEL)
    whole = write_gguf(scratch / "m.gguf", model, tokenizer=DEMO_MODEL).read_bytes()
    counter = iter(range(10**9))

    def read(chosen: random.Random | None) -> None:
        # What was read of a path is kept while its time is the same, which is coarse.
        path = scratch / f"model-{next(counter)}.gguf"
        # The weights are no more than numbers: the damage is to what stands before them.
        path.write_bytes(whole if chosen is None else damaged_bytes(whole, chosen, 300_000))
        try:
            check_gguf(path)
            _use(PromptEncoder.load(path, None))
        finally:
            path.unlink()

    return read


def _tokenizer(scratch: Path) -> Read:
    whole = (DEMO_MODEL / "tokenizer.json").read_bytes()

    def read(chosen: random.Random | None) -> None:
        content = whole if chosen is None else damaged_json(whole, chosen)
        (scratch / "tokenizer.json").write_bytes(content)
        _use(PromptEncoder.load(scratch, None))

    return read


def _start(checkpoint: str, scratch: Path) -> Read:
    """All that a start reads, of any file of a checkpoint."""
    whole = scratch / "whole"
    whole.mkdir()
    name = CHECKPOINTS[checkpoint](whole).relative_to(whole)
    counter = iter(range(10**9))

    def read(chosen: random.Random | None) -> None:
        changes = {}
        if chosen is not None:
            file = chosen.choice(files_of(whole))
            changes[file] = damaged(whole / file, chosen)
        into = scratch / str(next(counter))
        try:
            start(copy_with(whole, into, changes) / name)
        finally:
            shutil.rmtree(into)

    return read


KINDS: dict[str, Callable[[Path], Read]] = {
    "gguf header": _gguf,
    "gguf header, gemma4": partial(_gguf, family="gemma4_moe"),  # which has settings by layer
    "tokenizer.json": _tokenizer,
    **{name: partial(_start, name) for name in CHECKPOINTS},
}


def _use(encoder: PromptEncoder) -> None:
    """As requests would."""
    ids = encoder.encode(_TEXT)
    encoder.token_names(ids[:50])
    encoder.encode_within("word")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

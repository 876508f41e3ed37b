"""`python -m tests.bench.server.offload`: a prompt whose blocks are on disk, beside one that is
computed.

In each round a server answers prompts that nobody has asked before: their time to first token is
that of computing. It ends, the system's cache of its files is dropped, and a new server on the same
directory answers the same prompts: that is the disk's time. A third one answers them from files
that the system has in its cache, as it has where they were written lately. Prints the medians,
their spread, and as its last line JSON. Answers of one token are compared between the three.
"""

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import msgspec

from tests.bench.peers.models import SHAPES, write_model
from tests.support.serving import RunningServer
from tests.support.tier_files import files_in

WAYS = ("computed", "from disk", "from the system's cache")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--model", default="135m", help="a shape of random weights, or a directory")
    add("--flags", default="", help="of the server, such as '--num-threads 2'")
    add("--prefix", default="", help="a command that runs the server, such as 'chrt -f 20'")
    add("--input-len", type=int, default=1024)
    add("--prompts", type=int, default=8, help="of a round")
    add("--rounds", type=int, default=3)
    add("--dir", type=Path, help="where blocks are written (default: a temporary directory)")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    num_different = 0
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        model = args.model
        if model in SHAPES:
            model = str(Path(scratch) / "model")
            write_model(SHAPES[args.model], Path(model))
        blocks = Path(scratch) / "blocks"
        for number in range(args.rounds):
            prompts = _prompts(args.seed + number, args.prompts, args.input_len)
            answers = {}
            for way in WAYS:
                if way == "from disk":
                    _drop_from_cache(blocks)
                with _served(args, model, blocks) as server:
                    taken_s, answers[way], num_cached = _ask(server, prompts)
                times[way] += taken_s
                print(
                    f"round {number + 1}, {way}: median {median(taken_s) * 1e3:.1f} ms, "
                    f"{num_cached:.0f} of {args.input_len} tokens cached",
                    file=sys.stderr,
                    flush=True,
                )
            num_different += sum(answers[way] != answers[WAYS[0]] for way in WAYS)
        num_bytes = sum(path.stat().st_size for path in files_in(blocks))
    computed_s = median(times[WAYS[0]])
    print("| prefix | TTFT, median (spread), ms | of computing |\n|---|---:|---:|")
    for way, taken_s in times.items():
        print(
            f"| {way} | {median(taken_s) * 1e3:.1f} ({min(taken_s) * 1e3:.1f} to "
            f"{max(taken_s) * 1e3:.1f}) | {median(taken_s) / computed_s:.2f} |"
        )
    summary = {
        "seed": args.seed,
        "input_len": args.input_len,
        "num_bytes": num_bytes,
        "num_different": num_different,
        "ttft_s": {way: median(taken_s) for way, taken_s in times.items()},
    }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 1 if num_different else 0


def _prompts(seed: int, num: int, length: int) -> list[list[int]]:
    """Token ids, no two prompts with a common beginning."""
    chosen = random.Random(seed)
    return [[chosen.randrange(300, 8000) for _ in range(length)] for _ in range(num)]


@contextmanager
def _served(args: argparse.Namespace, model: str, blocks: Path) -> Iterator[RunningServer]:
    flags = ("--kv-offload-dir", str(blocks), "--served-model-name", "m")
    server = RunningServer(
        model, *flags, *shlex.split(args.flags), prefix=tuple(shlex.split(args.prefix))
    )
    try:
        server.wait_until_ready()
        # What a first step costs is not seen: prompts of other ids.
        _ask(server, [[10 + i] * args.input_len for i in range(3)])
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def _ask(server: RunningServer, prompts: list[list[int]]) -> tuple[list[float], list[str], float]:
    """Seconds, answers, and the mean of cached tokens. One after the other, of one token each, so
    that its time is the first token's."""
    taken_s, answers, num_cached = [], [], 0
    with httpx.Client(timeout=120) as client:
        for prompt in prompts:
            body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            started_s = time.perf_counter()
            response = client.post(f"{server.url}/v1/completions", json=body)
            taken_s.append(time.perf_counter() - started_s)
            answer = response.raise_for_status().json()
            answers.append(answer["choices"][0]["text"])
            num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return taken_s, answers, num_cached / len(prompts)


def _drop_from_cache(directory: Path) -> None:
    """The system reads these files from the disk again."""
    for path in files_in(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

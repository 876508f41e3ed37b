"""`python -m tests.bench.server.structured`: what a JSON schema costs, as a share of the plain
throughput.

The same prompts are sent for the same number of tokens, plain and with a schema that no output
completes. Plain and constrained rounds alternate, and each pair gives a ratio: other work on the
machine affects both, and the median leaves out outliers.
"""

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from penstock.loadtest.bench.http_target import HttpTarget, TargetConfig
from penstock.loadtest.bench.readiness import wait_until_ready, warm_up
from penstock.loadtest.bench.replay import raise_open_file_limit, replay, run
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import TimedRequest, make_requests

# Records as they are extracted from texts: names, numbers, a few words, a choice; without an end.
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": ["string", "null"], "pattern": "^[a-z]{2,20}@[a-z]{2,10}[.]com$"},
        "kind": {"enum": ["person", "company", "other"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["name", "age", "email", "kind", "tags", "score"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _RECORD, "minItems": 1000}
_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "records", "strict": True, "schema": _SCHEMA},
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=400, help="of each output")
    parser.add_argument("--rounds", type=int, default=9, help="of both arms")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("flags", nargs="*", help="of penstock serve, after --")
    args = parser.parse_args(argv)
    raise_open_file_limit()
    with _serving(args.concurrency, args.flags) as base_url:
        pairs = run(_measure(base_url, args))
    ratios = sorted(structured / plain for plain, structured in pairs)
    plain, structured = (statistics.median(arm) for arm in zip(*pairs, strict=True))
    ratio = statistics.median(ratios)
    print(
        f"{plain:,.0f} tokens/s plain, {structured:,.0f} held to a schema, at concurrency "
        f"{args.concurrency}; medians of {args.rounds} rounds: ratio {ratio:.3f} "
        f"({ratios[0]:.3f}-{ratios[-1]:.3f})",
        flush=True,
    )
    summary = {"plain": plain, "structured": structured, "ratio": ratio, "ratios": ratios}
    print(msgspec.json.encode({**vars(args), **summary}).decode(), flush=True)
    return 0


async def _measure(base_url: str, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Tokens per second of the plain and of the structured arm, round by round."""
    models = await wait_until_ready(base_url, timeout_s=60.0, say=lambda _: None)
    plain = TargetConfig(
        base_url=base_url,
        model=models[0].id,
        temperature=args.temperature,
        ignore_eos=True,
    )
    workload = WorkloadConfig(
        num_prompts=args.concurrency, input_len=16, output_len=args.num_tokens
    )
    held = replace(plain, extra_body={"response_format": _FORMAT})
    async with HttpTarget(plain) as plain_target, HttpTarget(held) as held_target:
        targets = (plain_target, held_target)
        for target in targets:
            await warm_up(target, workload, args.concurrency, None)
        pairs = []
        for number in range(args.rounds):
            requests = make_requests(replace(workload, seed=number))
            # Each arm goes first in every second round.
            order = targets if number % 2 == 0 else targets[::-1]
            rates = [await _rate(target, requests) for target in order]
            pairs.append((rates[0], rates[1]) if number % 2 == 0 else (rates[1], rates[0]))
    return pairs


async def _rate(target: HttpTarget, requests: list[TimedRequest]) -> float:
    observed = await replay(target, requests)
    assert not observed.failed, observed.failed[0].error
    num_tokens = sum(result.num_output_tokens for result in observed.completed)
    assert num_tokens == sum(request.max_tokens for request in requests), num_tokens
    return num_tokens / observed.duration_s


@contextlib.contextmanager
def _serving(concurrency: int, flags: list[str]) -> Iterator[str]:
    """The base URL of a server, which may still be loading."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "serve", "--port", str(port)]
    command += ["--max-num-seqs", str(concurrency), "--no-enable-prefix-caching", *flags]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.bench.server.metrics`: what metrics cost a step, a request and a scrape.

CPU time of one thread, the best of several rounds: other work on the machine only adds to it. The
cost per step is compared with steps of 0.3 ms (scheduling alone) and 10 ms (a model of about 8
billion parameters on a large GPU). The server's process spends it while the engine's computes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files

import msgspec
from tokenizers import Tokenizer

from penstock.engine.step.messages import StepReport
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.stats import AttentionWork, GroupBlocks, SchedulerStats, StepWork
from penstock.scheduler.types import RequestId, Started
from penstock.server.observability.metrics import Metrics
from penstock.server.output.choice import Choice
from penstock.server.output.detokenizer import TextDecoder, Vocabulary
from tests.support.known_hardware import on_known_hardware

STEPS_MS = (0.3, 10.0)
TARGET_SHARE = 0.01


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--num-sequences", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--num-rounds", type=int, default=5)
    args = parser.parse_args(argv)
    costs_us = measure(args.num_sequences, args.num_steps, args.num_rounds)
    for name, cost_us in costs_us.items():
        print(f"{name:<52}{cost_us:10.2f} us")
    step_us = costs_us["a step: its report"] + costs_us["a step: its tokens' gaps"]
    shares = {str(step_ms): step_us / (step_ms * 1e3) for step_ms in STEPS_MS}
    for step_ms, share in shares.items():
        print(f"{f'both, of a step of {step_ms} ms':<52}{share:10.2%}")
    result = {**vars(args), "us": costs_us, "share_of_step_ms": shares, "target": TARGET_SHARE}
    print(msgspec.json.encode(result).decode())
    return 0


def measure(num_sequences: int, num_steps: int, num_rounds: int) -> dict[str, float]:
    """Microseconds of CPU."""
    metrics, aliased = _used(has_vllm_names=False), _used(has_vllm_names=True)
    choices = [_choice(metrics) for _ in range(num_sequences)]
    reports = [_report(step, num_sequences) for step in range(1, num_steps + 1)]

    for report in reports:
        aliased.on_step(report)

    def steps() -> None:
        for report in reports:
            metrics.on_step(report)

    def gaps() -> None:
        """As `Generation` has them, a token of each stream, and all counted at the next look."""
        for _ in reports:
            metrics.gaps.advance(time.monotonic())
            for choice in choices:
                metrics.gaps.since_s.append(choice.last_token_s)
                choice.last_token_s = metrics.gaps.now_s

    def requests() -> None:
        """All that is observed once: in the queue, at the first token, at the end."""
        for i in range(num_steps):
            request_id = RequestId(str(i))
            metrics.on_submit(request_id, 100, 0.0)
            metrics._start(Started(request_id, 0, 0.0, 0))
            for histogram in (metrics.ttft, metrics.prefill_time, metrics.decode_time):
                histogram.observe(0.05)
            for histogram in (metrics.tpot, metrics.answer_lengths, metrics.latency):
                histogram.observe(0.005)
            metrics.outcomes["stop"] += 1
            metrics.forget(request_id)

    named: dict[str, tuple[Callable[[], object], int]] = {
        "a step: its report": (steps, num_steps),
        "a step: its tokens' gaps": (gaps, num_steps),
        "a request: all that is observed once": (requests, num_steps),
        "a scrape": (metrics.text, 1),
        "a scrape with vLLM's names": (aliased.text, 1),
    }
    best = dict.fromkeys(named, float("inf"))
    for _ in range(num_rounds):  # interleaved, so that all see the machine's moods
        for name, (work, count) in named.items():
            best[name] = min(best[name], _cpu_us(work) / count)
    return best


def _used(*, has_vllm_names: bool) -> Metrics:
    """With every metric that a server has, for every class of steps."""
    metrics = Metrics("model", has_vllm_names=has_vllm_names)
    metrics.on_ready(on_known_hardware())
    metrics.on_response("/v1/completions", "POST", 200)
    for histogram in (metrics.ttft, metrics.latency, metrics.tpot, metrics.decode_time):
        for i in range(1000):
            histogram.observe(i * 0.0007)
    return metrics


def _choice(metrics: Metrics) -> Choice:
    """One that has had its first token."""
    decoder = TextDecoder(_vocabulary(), is_whole=True)
    choice = Choice(0, decoder, None, False)
    choice.last_token_s = metrics.gaps.now_s
    return choice


@cache
def _vocabulary() -> Vocabulary:
    path = files("penstock.engine.hub") / "demo_model" / "tokenizer.json"
    return Vocabulary(Tokenizer.from_file(str(path)))


def _report(step: int, num_sequences: int) -> StepReport:
    """Of a decode step, as it comes from the engine."""
    outputs = StepOutputs(
        [RequestId(f"r{i}") for i in range(num_sequences)],
        [0] * num_sequences,
        [step] * num_sequences,
        [0] * num_sequences,
    )
    return StepReport(
        step=step,
        outputs=outputs,
        stats=SchedulerStats(num_sequences, groups=(GroupBlocks(None, 1000, 0, 1000),)),
        work=StepWork(
            0, num_sequences, num_sequences, num_sequences, 0, (AttentionWork(1000, 1000),)
        ),
        started_s=time.monotonic() + step * 0.01,
        step_s=0.0099,
        model_bytes=1 << 30,
        model_flops=1 << 40,
    )


def _cpu_us(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return (time.process_time() - started_s) * 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.bench.scheduler_step`: what the scheduler costs, on the real `Scheduler`.

A step is one `schedule` and one `update` with every sequence decoding. Admission is `add`,
`schedule` and `update` of one prompt that runs in one step and ends with its first token: first of
new prompts, then of the same prompts again, whose blocks are in the prefix cache. Besides, what the
step model costs a step: predicting its time, and learning from it.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from random import Random

import msgspec

from penstock.loadtest.report.report import percentile
from penstock.loadtest.workload.workload import make_prompt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.types import (
    Request,
    RequestId,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
)
from tests.support.made_up_steps import made_up_steps, served_model

# At 3 ms a decode step, which is a small model on a large GPU, half a millisecond is 17 %.
LIMIT_US = 500.0
STEP_MODEL_LIMIT_US = 20.0
BLOCK_SIZE = 16


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--num-seqs", type=int, default=256, help="sequences that decode")
    parser.add_argument("--context", type=int, default=1000, help="their mean length, in tokens")
    parser.add_argument("--equal-lengths", action="store_true", help="the worst case for p99")
    parser.add_argument("--num-steps", type=int, default=400, help="steps of one round")
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=200, help="admissions of one round")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    schedule_us, update_us, new_us, again_us = [], [], [], []
    for number in range(args.num_rounds):
        seed = args.seed + number
        for schedule, update in decode_steps(
            args.num_seqs, args.context, args.num_steps, seed, args.equal_lengths
        ):
            schedule_us.append(schedule * 1e6)
            update_us.append(update * 1e6)
        new, again = admissions(args.num_prompts, args.prompt_len, seed)
        new_us += [seconds * 1e6 for seconds in new]
        again_us += [seconds * 1e6 for seconds in again]

    learning, predicting = step_model(args.num_steps * args.num_rounds, args.seed)
    learn_us = [seconds * 1e6 for seconds in learning]
    predict_us = [seconds * 1e6 for seconds in predicting]
    model_us = sum(learn_us + predict_us) / len(learn_us)

    step_us = [a + b for a, b in zip(schedule_us, update_us, strict=True)]
    step = f"step, {args.num_seqs} sequences at {args.context} tokens"
    figures = {
        f"{step} (limit {LIMIT_US:.0f})": step_us,
        "  of this schedule": schedule_us,
        "  of this update": update_us,
        f"admission, {args.prompt_len} new tokens": new_us,
        f"admission, {args.prompt_len} cached tokens": again_us,
        "step model, learning from a step": learn_us,
        "step model, predicting a step": predict_us,
    }
    print(f"{'microseconds':<48} {'median':>9} {'p99':>9}")
    for label, values in figures.items():
        values.sort()
        print(f"{label:<48} {percentile(values, 50):>9.1f} {percentile(values, 99):>9.1f}")
    print(f"step model, mean of both together (limit {STEP_MODEL_LIMIT_US:.0f}): {model_us:.1f}")
    summary = {
        "num_seqs": args.num_seqs,
        "context": args.context,
        "equal_lengths": args.equal_lengths,
        "num_steps": len(step_us),
        "seed": args.seed,
        "limit_us": LIMIT_US,
        "median_step_us": percentile(step_us, 50),
        "p99_step_us": percentile(step_us, 99),
        "meets_limit": percentile(step_us, 50) <= LIMIT_US,
        "median_admission_new_us": percentile(new_us, 50),
        "median_admission_cached_us": percentile(again_us, 50),
        "mean_step_model_us": model_us,
    }
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def decode_steps(
    num_seqs: int, context: int, num_steps: int, seed: int, has_equal_lengths: bool
) -> Iterable[tuple[float, float]]:
    """Seconds of `schedule` and of `update`, of each step in which all sequences decode.

    Prompts are shorter than `context` by half the steps, so the mean over the steps is `context`;
    all are computed in one huge step. Unless lengths are equal they differ by up to a block, as
    those of real requests do: equal ones fill their blocks all in the same step.
    """
    prompt_len = max(1, context - num_steps // 2 - BLOCK_SIZE // 2)
    max_len = prompt_len + BLOCK_SIZE + num_steps + 2
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * max_len),
        groups=[KVGroup(num_seqs * (max_len // BLOCK_SIZE + 1))],
        block_size=BLOCK_SIZE,
        max_model_len=max_len,
    )
    for number in range(num_seqs):
        stagger = BLOCK_SIZE // 2 if has_equal_lengths else number % BLOCK_SIZE
        scheduler.add(_request(f"{seed}/{number}", prompt_len + stagger, num_steps + 2))
    scheduler.update(_sampled(_scheduled(scheduler)))
    _freeze()
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        batch = _scheduled(scheduler)
        scheduled_s = time.perf_counter()
        sampled = _sampled(batch)  # the executor's work, which is not timed
        update_s = time.perf_counter()
        outputs = scheduler.update(sampled)
        end_s = time.perf_counter()
        assert len(outputs) == num_seqs, f"{len(outputs)} of {num_seqs} sequences decoded"
        yield scheduled_s - begin_s, end_s - update_s


def admissions(num_prompts: int, prompt_len: int, seed: int) -> tuple[list[float], list[float]]:
    """Seconds of each prompt when it is new, and when it is cached."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=max(2048, prompt_len)),
        groups=[KVGroup((num_prompts + 1) * (prompt_len // BLOCK_SIZE + 1))],
        block_size=BLOCK_SIZE,
        max_model_len=prompt_len + 1,
    )
    prompts = [f"{seed}/{number}" for number in range(num_prompts)]
    rounds = [[_request(name, prompt_len, 1) for name in prompts] for _ in range(2)]
    _freeze()
    new, again = ([_admission(scheduler, request) for request in turn] for turn in rounds)
    hits = scheduler.stats().prefix_hit_tokens_total
    assert hits == num_prompts * ((prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE), f"{hits} hits"
    return new, again


def step_model(num_steps: int, seed: int) -> tuple[list[float], list[float]]:
    """Processor seconds of each step that is observed while serving, and of each prediction.

    Nine of ten steps are decodes, as of a server that has something to do.
    """
    live, random = LiveStepModel(served_model()), Random(seed)
    every = made_up_steps(6 * num_steps, seed=seed)
    busy = (s for s in every if s.kind is StepClass.DECODE or random.random() < 1 / 18)
    samples = list(islice(busy, num_steps))
    _freeze()
    learning = [_seconds(partial(live.observe, sample)) for sample in samples]
    predicting = [_seconds(partial(live.predict, s.amounts, s.kind)) for s in samples]
    return learning, predicting


def _seconds(run: Callable[[], object]) -> float:
    begin_s = time.thread_time()
    run()
    return time.thread_time() - begin_s


def _admission(scheduler: Scheduler, request: Request) -> float:
    begin_s = time.perf_counter()
    scheduler.add(request)
    batch = _scheduled(scheduler)
    scheduled_s = time.perf_counter()
    sampled = _sampled(batch)
    update_s = time.perf_counter()
    outputs = scheduler.update(sampled)
    end_s = time.perf_counter()
    (output,) = outputs
    assert output.finish, f"it did not end in one step: {output}"
    return scheduled_s - begin_s + end_s - update_s


def _request(name: str, prompt_len: int, max_tokens: int) -> Request:
    return Request(
        id=RequestId(name),
        prompt_token_ids=tuple(make_prompt(name, prompt_len, vocab_size=32_000)),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_s=0.0,
    )


def _scheduled(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule(0.0)
    assert batch is not None, "no sequence could run"
    return batch


def _sampled(batch: ScheduledBatch) -> SampledTokens:
    return SampledTokens(step=batch.step, token_ids=[7] * sum(batch.samples))


def _freeze() -> None:
    """As the engine does once it is loaded: the collector skips long-lived objects."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

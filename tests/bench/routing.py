"""`python -m tests.bench.routing`: what a router brings to conversations on two replicas.

Eight conversations of six turns, whose turns come in any order, in virtual time: the routers that
serve, the scheduler with its real blocks, and the steps of an 8B model on an H200 by its
datasheet. A replica's pool of keys and values holds a share of the tokens that all conversations
have in the end: at 1 each has room for everything, at a half both together have. Tokens that were
found in the cache, over five seeds, and the largest share of the tokens that one replica got.
"""

import argparse
import sys
from dataclasses import replace
from random import Random
from typing import NamedTuple

from penstock.loadtest.simulate.simulation import Plan, simulate
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.routing import RouterPolicy
from tests.bench.targets import server

NUM_CHATS, NUM_TURNS, NUM_REPLICAS = 8, 6, 2
NUM_SAID, NUM_ANSWERED = 160, 64  # tokens of each turn
GAP_S = 2.0  # between a conversation's turns, on average
SHARES = (1.0, 0.75, 0.6, 0.5, 0.4)
ANSWER_ID = 7  # what a predicted executor samples, always


BLOCK_SIZE = 16


class Routed(NamedTuple):
    """cached: tokens. largest: share of the prompts' tokens that one replica got."""

    cached: int
    largest: float


def conversations(seed: int) -> list[TimedRequest]:
    """Each turn begins with all before it."""
    random = Random(seed)
    made: list[TimedRequest] = []
    for _ in range(NUM_CHATS):
        at_s = random.random() * GAP_S
        text: list[int] = []
        for _ in range(NUM_TURNS):
            text = text + [random.randrange(10, 1000) for _ in range(NUM_SAID)]
            made.append(
                TimedRequest(
                    index=len(made),
                    arrival_s=at_s,
                    prompt=text,
                    num_prompt_tokens=len(text),
                    max_tokens=NUM_ANSWERED,
                )
            )
            text = text + [ANSWER_ID] * NUM_ANSWERED
            at_s += GAP_S * (0.5 + random.random())
    return sorted(made, key=lambda each: each.arrival_s)


def routed(policy: RouterPolicy, num_blocks: int, seed: int) -> Routed:
    made = server(SchedulerConfig())
    info = replace(made.info, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=2048)
    plan = Plan(server=made._replace(info=info), num_replicas=NUM_REPLICAS, router=policy)
    stats = simulate(plan, conversations(seed)).stats
    asked = [each.prefix_query_tokens_total for each in stats]
    return Routed(sum(each.prefix_hit_tokens_total for each in stats), max(asked) / sum(asked))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args(argv).seeds)
    total = NUM_CHATS * NUM_TURNS * (NUM_SAID + NUM_ANSWERED) // BLOCK_SIZE
    policies = list(RouterPolicy)
    print(f"| pool | {' | '.join(policies)} | times | largest share |")
    print("|---:|" + "---:|" * (len(policies) + 2))
    for share in SHARES:
        num_blocks = round(share * total)
        found = {policy: [routed(policy, num_blocks, s) for s in seeds] for policy in policies}
        cached = {policy: sum(each.cached for each in found[policy]) for policy in policies}
        times = cached[RouterPolicy.PREFIX_AWARE] / cached[RouterPolicy.ROUND_ROBIN]
        largest = max(each.largest for each in found[RouterPolicy.PREFIX_AWARE])
        cells = " | ".join(f"{cached[policy]:,}" for policy in policies)
        print(f"| {share:.2f} | {cells} | {times:.2f} | {largest:.0%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prompts on a `Driver` whose pool has a tier below it."""

from penstock.scheduler.stats import PlaceStats, TierStats
from penstock.scheduler.types import Request
from tests.support.scheduling import Driver, tokens_alone

IDENTITY, GIB = bytes(32), 2**30
BLOCK_SIZE, MAX_MODEL_LEN = 4, 64


def hits(driver: Driver, request: Request) -> int:
    """Prompt tokens that were not computed. The answer must be right, whatever they were."""
    driver.scheduler.add(request)
    driver.run()
    assert driver.tier
    driver.tier.work()
    key = (request.id, 0)
    num_states = min(driver.executor.info.num_states, 8)
    alone = tokens_alone(request, max_model_len=MAX_MODEL_LEN, num_states=num_states)
    assert driver.tokens[key] == alone[key]
    return driver.num_cached[key]


def stats(driver: Driver) -> TierStats:
    found = driver.scheduler.stats().tier
    assert found
    return found


def in_memory(driver: Driver) -> PlaceStats:
    found = stats(driver).memory
    assert found
    return found


def on_disk(driver: Driver) -> PlaceStats:
    found = stats(driver).disk
    assert found
    return found

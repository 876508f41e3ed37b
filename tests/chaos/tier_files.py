"""Files of blocks are damaged, one at a time, and their prompts asked again on an empty pool."""

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from penstock.engine.config import Device, EngineConfig
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.support.executors import cpu_executor
from tests.support.paths import DEMO_MODEL
from tests.support.tier_files import DAMAGES, damage, files_in


class Outcome(NamedTuple):
    """num_found: of the faults, those that were noticed. num_hits: prompt tokens that were read."""

    num_faults: int
    num_found: int
    num_different: int
    num_hits: int


class _Asked:
    """One executor, and for each prompt a scheduler whose pool is empty."""

    def __init__(self, directory: Path, num_threads: int | None) -> None:
        self._config = SchedulerConfig(max_num_seqs=4)
        config = EngineConfig(
            model=str(DEMO_MODEL),
            device=Device.CPU,
            num_threads=num_threads,
            kv_offload_dir=str(directory),
            kv_cache_memory_bytes=64 * 2**20,
            scheduler=self._config,
        )
        self._executor = cpu_executor(config, DEMO_MODEL)
        assert self._executor.tier
        self.tier = self._executor.tier

    def ask(self, prompt: tuple[int, ...], tier: DiskTier | None) -> list[int]:
        info = self._executor.info
        scheduler = Scheduler(
            self._config,
            groups=info.kv_groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            tier=tier,
        )
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        scheduler.add(
            Request(id=RequestId("a"), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0)
        )
        token_ids: list[int] = []
        while scheduler.has_work:
            batch = scheduler.schedule(time.monotonic())
            if batch is None:
                time.sleep(0.0002)  # it waits for its blocks
                continue
            for output in scheduler.update(self._executor.execute(batch).wait()):
                token_ids += output.token_ids
        if tier:
            tier.flush()
        return token_ids


def damage_files(
    num_faults: int,
    *,
    seed: int,
    num_prompts: int = 16,
    num_threads: int | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Each fault is one file of a prompt's beginning, damaged in one of DAMAGES."""
    chosen = random.Random(seed)
    # A block that the answer completes would be written, and not be asked for.
    lengths = [16 * chosen.randrange(6, 18) + chosen.randrange(1, 12) for _ in range(num_prompts)]
    prompts = [tuple(chosen.randrange(3, 400) for _ in range(length)) for length in lengths]
    num_different = 0
    with TemporaryDirectory() as scratch:
        asked = _Asked(Path(scratch), num_threads)
        expected = [asked.ask(prompt, None) for prompt in prompts]
        prompt_of: dict[Path, int] = {}
        for number, prompt in enumerate(prompts):
            asked.ask(prompt, asked.tier)
            for path in files_in(Path(scratch)):
                prompt_of.setdefault(path, number)
        files = sorted(prompt_of)
        for fault in range(num_faults):
            path = chosen.choice(files)
            damage(path, DAMAGES[fault % len(DAMAGES)], seed=fault)
            number = prompt_of[path]
            num_different += asked.ask(prompts[number], asked.tier) != expected[number]
            if (fault + 1) % 100 == 0:
                say(f"{fault + 1} files damaged, {num_different} answers different so far")
        stats = asked.tier.place_stats()
        num_hits = stats.read_bytes_total // asked.tier._memory.num_bytes(0) * 16
        asked.tier._scanned_s = math.inf  # its thread would warn that the directory is gone
    return Outcome(num_faults, stats.damaged_blocks_total, num_different, num_hits)

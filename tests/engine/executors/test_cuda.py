"""The CUDA executor gives what the CPU's gives, ids and logprobs, on real weights."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.paths import STORIES
from tests.support.stories import needs_stories

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import Device, Dtype, EngineConfig
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.executor import CudaExecutor, DeviceModel
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.lora.store import no_adapters
from penstock.engine.models.weights import Checkpoint
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.executor import Executor, PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, RequestOutput, SamplingParams
from tests.support.executors import cpu_executor
from tests.support.kernels import DEVICE

pytestmark = needs_stories


class Limits(NamedTuple):
    """budget: of tokens in a step."""

    max_len: int
    num_blocks: int
    budget: int
    num_layers: int = 5


# The interpreter takes half a minute for a layer of so many tokens.
SMALL, LARGE = Limits(96, 24, 32), Limits(640, 45, 600, num_layers=1)
BLOCK_SIZE, MAX_SEQS, MAX_LEN = 16, 3, SMALL.max_len
CONFIG = SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=SMALL.budget)
# Of logprobs: sums of float32 in another order, through five layers.
TOLERANCE = 1e-4
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5}


def _cpu() -> CpuExecutor:
    return cpu_executor(
        EngineConfig(
            model=str(STORIES),
            device=Device.CPU,
            dtype=Dtype.FLOAT32,
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=2**22,
            num_threads=1,
            scheduler=CONFIG,
        ),
        STORIES,
    )


def _cuda(
    like: CpuExecutor, chunk_sizes: tuple[int, ...] = (), limits: Limits = SMALL
) -> CudaExecutor:
    """On the GPU where there is one, else on the CPU by Triton's interpreter."""
    max_len, num_blocks, budget, _ = limits
    config = ModelConfig.from_dir(STORIES)
    config = replace(config, layers=config.layers[: limits.num_layers])

    def empty(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=DEVICE)

    with torch.inference_mode():
        llama = LlamaModel(
            config,
            Checkpoint(STORIES, empty),
            PlainLinear,
            max_model_len=max_len,
            device=DEVICE,
        )
    pool = KVPools(
        config.kv_shape,
        KVLayout.of(config.windows, max_len),
        [num_blocks + 1],
        BLOCK_SIZE,
        torch.float32,
        DEVICE,
    )
    windows = config.attention_windows(BLOCK_SIZE)
    attention = PagedAttention(
        windows, MAX_SEQS, budget, num_sms=1, device=DEVICE, dtype=torch.float32
    )
    grammars = Grammars(GrammarCompiler(STORIES, config.vocab_size, config.eos_token_ids))
    return CudaExecutor(
        DeviceModel(
            model=FusedModel(llama, pool, attention, MAX_SEQS),
            pool=pool,
            tables=DeviceTables(MAX_SEQS, max_len, BLOCK_SIZE, [num_blocks], DEVICE),
            grammars=GrammarTable(grammars, MAX_SEQS, config.vocab_size),
            info=replace(like.info, num_blocks=num_blocks),
            max_num_seqs=MAX_SEQS,
            chunk_sizes=chunk_sizes,
            adapters=no_adapters(MAX_SEQS),
        )
    )


def _run(
    executor: Executor, requests: list[Request], *, ahead: bool, limits: Limits = SMALL
) -> list[RequestOutput]:
    """All their outputs; `ahead`: each step is launched before the one before is waited for."""
    max_len, num_blocks, budget, _ = limits
    config = replace(CONFIG, max_num_batched_tokens=budget)
    scheduler = Scheduler(
        config, groups=[KVGroup(num_blocks)], block_size=BLOCK_SIZE, max_model_len=max_len
    )
    for request in requests:
        scheduler.add(request)
    outputs: list[RequestOutput] = []
    launched: PendingTokens | None = None
    while scheduler.has_work or launched:
        batch = scheduler.schedule(0.0)
        pending = executor.execute(batch) if batch else None
        if not ahead:
            launched, pending = pending, None
        if launched:
            outputs += scheduler.update(launched.wait())
        launched = pending
    return outputs


def _ids(outputs: list[RequestOutput]) -> dict[tuple[str, int], list[int]]:
    ids: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        ids.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return ids


def _logprobs(outputs: list[RequestOutput]) -> dict[tuple[str, int], list[float]]:
    """Of answers, then of prompts (as answer -1)."""
    found: dict[tuple[str, int], list[float]] = {}
    for output in outputs:
        for entry in output.logprobs or ():
            found.setdefault((output.request_id, output.index), []).append(entry.logprob)
        if output.prompt and output.prompt.logprobs:
            found[output.request_id, -1] = [entry.logprob for entry in output.prompt.logprobs]
    return found


def _requests() -> list[Request]:
    """Prompts shorter and longer than a step's budget, sampled in several ways, one twice; none by
    chance, since the two draw differently. The first still decodes when the last one's prompt
    comes, and after it.
    """
    samplings = [
        (35, 1, SamplingParams(max_tokens=7, temperature=0.0, num_prompt_logprobs=1)),
        (5, 2, SamplingParams(max_tokens=3, temperature=0.8, top_k=1)),
        (17, 1, SamplingParams(max_tokens=3, temperature=0.0, num_logprobs=2, **PENALTIES)),
    ]
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            id=RequestId(f"request-{i}"),
            prompt_token_ids=tuple(torch.randint(3, 512, (size,), generator=generator).tolist()),
            sampling=sampling,
            arrival_s=0.0,
            n=n,
        )
        for i, (size, n, sampling) in enumerate(samplings)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("chunk_sizes", [(), (6, 24, 32)])
def test_one_step_ahead_it_gives_what_the_cpu_executor_gives(chunk_sizes: tuple[int, ...]) -> None:
    """chunk_sizes: steps with chunks are padded to these, or run as they are."""
    cpu = _cpu()
    expected = _run(cpu, _requests(), ahead=False)
    found = _run(_cuda(cpu, chunk_sizes), _requests(), ahead=True)
    assert _ids(found) == _ids(expected)
    assert _logprobs(found).keys() == _logprobs(expected).keys()
    for key, logprobs in _logprobs(expected).items():
        assert _logprobs(found)[key] == pytest.approx(logprobs, abs=TOLERANCE)


@pytest.mark.slow
def test_a_large_step_that_is_padded_gives_what_it_gives_as_it_is() -> None:
    """Beside another prompt, and its rest beside that one's decode."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, num_logprobs=2)
    prompts = ((7, 5, 3), tuple(3 + (7 * index) % 500 for index in range(LARGE.budget)))
    requests = [
        Request(id=RequestId(str(index)), prompt_token_ids=ids, sampling=sampling, arrival_s=0.0)
        for index, ids in enumerate(prompts)
    ]
    cpu = _cpu()
    outputs = []
    for sizes in ((), (64, 640)):
        executor = _cuda(cpu, sizes, LARGE)
        assert executor.info.graph_sizes.chunks == sizes
        outputs.append(_run(executor, requests, ahead=False, limits=LARGE))
    expected, found = outputs
    assert _ids(found) == _ids(expected)
    for key, logprobs in _logprobs(expected).items():
        assert _logprobs(found)[key] == pytest.approx(logprobs, abs=TOLERANCE)


@pytest.mark.slow
def test_sampled_ids_do_not_depend_on_the_other_rows() -> None:
    sampling = SamplingParams(max_tokens=3, seed=5, temperature=1.0, top_p=0.95)
    drawn = replace(_requests()[1], id=RequestId("drawn"), sampling=sampling)
    executor = _cuda(_cpu())
    alone = _ids(_run(executor, [drawn], ahead=True))
    together = _ids(_run(executor, [_requests()[2], drawn], ahead=True))
    assert {key: together[key] for key in alone} == alone


@pytest.mark.slow
def test_greedy_ids_are_the_golden_ones() -> None:
    entry = json.loads((STORIES / "golden.json").read_text())[0]
    request = Request(
        id=RequestId("golden"),
        prompt_token_ids=tuple(entry["prompt_ids"]),
        sampling=SamplingParams(max_tokens=6, temperature=0.0),
        arrival_s=0.0,
    )
    outputs = _run(_cuda(_cpu()), [request], ahead=True)
    assert _ids(outputs)["golden", 0] == entry["new_ids"][:6]

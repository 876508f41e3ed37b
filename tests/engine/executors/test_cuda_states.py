"""A GPU's path serves models with gated delta nets: by Triton's interpreter, with transformers as
the oracle and the CPU's executor as the other one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.config import AdapterSource, EngineConfig, LoraConfig, Quantization
from penstock.engine.executors.cuda.chunk_steps import ChunkSteps
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.launched_step import LaunchedStep
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.groups import StateGroup
from penstock.scheduler.types import Request, RequestId, RequestOutput, SamplingParams
from tests.support.adapters import ALL, OF_DELTA_NETS, save_adapter
from tests.support.executors import cuda_executor
from tests.support.kernels import ON_GPU
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import engine_config, make_model, save

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
BLOCK_SIZE, MAX_LEN = 8, 40
TOLERANCE = 1e-4
# As few programs as show every kind of layer: one gated delta net, and one attention.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
}


class Served:
    """A small random model, as transformers has it, and an engine with few blocks and states."""

    def __init__(
        self, path: Path, family: str, options: dict[str, Any], num_blocks: int | None = None
    ) -> None:
        self.oracle = make_model(family, **options)
        save(self.oracle, path)
        self.config = engine_config(
            path,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN,
            kv_cache_memory_bytes=2**20,
            scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=12),
        )
        self.executor: CudaExecutor = cuda_executor(self.config, path, Interpreter())
        self.scheduler = SteppedEngine(self.config, self.executor, num_blocks).scheduler

    def run(self, *requests: Request) -> list[list[RequestOutput]]:
        """Checks that their answers are likely, and as likely as said.

        As in the engine's loop, each step is launched before the one before is waited for.
        """
        found: dict[str, list[RequestOutput]] = {each.id: [] for each in requests}
        for request in requests:
            self.scheduler.add(request)
        launched: LaunchedStep | None = None
        while self.scheduler.has_work or launched:
            batch = self.scheduler.schedule(0.0)
            pending, launched = launched, self.executor.execute(batch) if batch else None
            for output in self.scheduler.update(pending.wait()) if pending else ():
                found[output.request_id].append(output)
        for request in requests:
            for index in range(request.n):
                own = [each for each in found[request.id] if each.index == index]
                self._check(
                    request, ids_of(own), [e.logprob for o in own for e in o.logprobs or ()]
                )
        return list(found.values())

    @torch.inference_mode()
    def _check(self, request: Request, answer: list[int], logprobs: list[float]) -> None:
        assert len(answer) == len(logprobs) == request.sampling.max_tokens
        tokens = torch.tensor([[*request.prompt_token_ids, *answer]])
        logits = self.oracle(tokens).logits[0, len(request.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), chosen, atol=TOLERANCE, rtol=0)
        if request.sampling.temperature == 0:
            # Two tokens whose logits are as close as this may change places.
            assert (expected.amax(1) - chosen).max() < TOLERANCE


def request(name: str, prompt: list[int], max_tokens: int, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=float(n > 1), num_logprobs=1)
    return Request(
        id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling, arrival_s=0.0, n=n
    )


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (num_tokens,), generator=generator).tolist()


def test_chunks_decodes_and_a_prefix_from_a_snapshot_are_as_transformers_has_them(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path, "qwen3_5", SMALL)
    assert isinstance(served.executor.info.kv_groups[1], StateGroup)
    (first,) = served.run(request("a", prompt(17), 2))
    (second,) = served.run(request("b", [*prompt(17), *ids_of(first), 7], 1))
    assert second[-1].num_cached_tokens == 8


@pytest.mark.slow
def test_company_preemption_hits_and_samples_are_as_transformers_has_them(tmp_path: Path) -> None:
    served = Served(tmp_path, "qwen3_5_narrow", SMALL, num_blocks=6)
    prompts = prompt(16), prompt(7, 1), prompt(7, 2)
    served.run(*(request(str(i), each, 4) for i, each in enumerate(prompts)))
    served.run(request("d", [*prompts[0][:12], *prompts[1]], 2, n=2))
    stats = served.scheduler.stats()
    assert stats.prefix_hit_tokens_total and stats.preemptions_total


@pytest.mark.slow
def test_a_mixtures_steps_are_the_same_padded_to_a_graphs_size(tmp_path: Path) -> None:
    served = Served(tmp_path, "qwen3_5_moe", SMALL)
    executor = served.executor
    executor._chunks = ChunkSteps(executor._model, executor._tables, (6, 12))
    (first,) = served.run(request("a", prompt(17), 2))
    served.run(request("b", [*prompt(17), *ids_of(first), 7], 2), request("c", prompt(5), 2))


@pytest.mark.slow
def test_an_adapter_of_all_layers_gives_what_the_cpu_executor_gives(tmp_path: Path) -> None:
    model = make_model("qwen3_5", **SMALL)
    path = save(model, tmp_path / "base")
    adapter = save_adapter(model, tmp_path / "adapter", targets=(*ALL, *OF_DELTA_NETS))
    config = engine_config(
        path,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        kv_cache_memory_bytes=2**20,
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=12),
        lora=LoraConfig(max_loras=1, max_rank=8),
    )
    found: list[Any] = []
    for executor in (None, cuda_executor(config, path, Interpreter())):
        engine = SteppedEngine(config, executor)
        assert engine.executor.adapters is not None
        source = AdapterSource(name="adapter", path=str(adapter))
        loaded = engine.executor.adapters.load(source).result().id
        requests = [
            make_request("a", 5, max_tokens=2, adapter=loaded),
            make_request("b", 5, max_tokens=2),
        ]
        found.append([ids_of(outputs) for outputs in engine.run(requests)])
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_what_recurrent_layers_cannot_do_on_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    path = save(make_model("qwen3_5_narrow"), tmp_path)
    config: EngineConfig = engine_config(path)
    refused = {
        "--quantization is int8": replace(config, quantization=Quantization.INT8),
    }
    for message, changed in refused.items():
        with pytest.raises(InvalidConfig, match=message):
            cuda_executor(changed, path, Interpreter())

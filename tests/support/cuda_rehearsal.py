"""The CUDA executor without a GPU.

    python -m tests.support.cuda_rehearsal ROUNDS [MODEL] [int8|fp8] [FLAGS]

MODEL: a key of `MODELS`, by default llama. int8, fp8: of the KV cache. FLAGS: --enforce-eager;
--unmapped, where kernels do not reach pinned memory;
--drafts, where steps of decodes have some;
--enable-lora, for all requests once more, whose tokens have an adapter then; --offload, with blocks
that go to the host's memory and come back; --rank=0 or --rank=1, of two that split each layer, or
--stage-rank=0, 1 or 2, of as many stages: each steps through the same batches.

Runs it from its start through busy serving on `tests.support.pretend_gpu`, with the real scheduler
and requests that use every option. Prints one JSON object: the kernels compiled at the start and
while serving (each of those would be a stall of a second), where the host waited for the device,
the launches of a decode step, and memory. Run it without TRITON_INTERPRET.
"""

import json
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import (
    Device,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    LoraConfig,
    SpeculativeConfig,
)
from penstock.engine.executors.awaited_ids import StepIds
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.first_steps import OneForAll
from penstock.engine.executors.cuda.host_ids import HostIds
from penstock.engine.kernels.tables import gather_decodes, store_sampled
from penstock.engine.memory.tiers.host_tier import HostTier
from penstock.engine.models.config import ModelConfig
from penstock.engine.ranks.board import Board, board_memory
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.rendezvous import Rendezvous, rendezvous_memory
from penstock.engine.ranks.torch_ranks import SOLE_DEVICE, SoleDevice, TorchRanks
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import (
    Pooling,
    PromptOutput,
    Request,
    RequestId,
    SampledTokens,
    SamplingParams,
    ScheduledBatch,
)
from tests.bench.engine.models import model_fields
from tests.support.executors import cuda_executor
from tests.support.pretend_gpu import BrokenRule, PretendGpu
from tests.support.quantized_checkpoints import FORMATS
from tests.support.sampling_ways import WAYS

# Differences from `write_model`.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen2": {  # biases, and a sliding window in all layers but the first
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_scaling": None,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "qwen3": {  # QK-norm, and one matrix for embedding and output
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_scaling": None,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_5": {  # a gated delta net, and attention with gates
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "gemma4": {  # as E2B: two shapes of heads, shared keys and values, inputs of each layer
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "rope_scaling": None,
        "rope_theta": None,
        "hidden_act": None,
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        "global_head_dim": 32,
        "sliding_window": 64,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 8192,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {  # a mixture, with Qwen3-30B-A3B's number of experts
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_scaling": None,
        "num_hidden_layers": 2,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    # Weights in codes.
    "codes-int4": {"num_hidden_layers": 2, "quantization_config": FORMATS["awq"].settings},
    "codes-fp8": {
        "num_hidden_layers": 2,
        "quantization_config": FORMATS["ct-fp8-channel"].settings,
    },
}


def broken_rules() -> dict[str, str]:
    """Operations that a device would forbid, and the error that the pretended one raises."""
    gpu = PretendGpu()
    with gpu.installed():
        cuda = torch.device("cuda", 0)
        x, ids = torch.zeros(8, device=cuda), torch.zeros(8, dtype=torch.int32, device=cuda)
        pool = torch.cuda.graph_pool_handle()

        def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                run()
            return graph

        def replay_freed() -> None:
            outside = [torch.zeros(8, device=cuda)]
            graph = captured(lambda: outside[0].add_(1))
            outside.clear()
            graph.replay()

        def use_overwritten() -> None:
            kept: list[torch.Tensor] = []
            first, second = (captured(lambda: kept.append(x + 1)) for _ in range(2))
            first.replay()
            second.replay()
            kept[0].add_(1)

        def read_early() -> None:
            host = torch.empty(8, pin_memory=True)
            host.copy_(x, non_blocking=True)
            torch.cuda.Event().synchronize()  # type: ignore[no-untyped-call]
            host.tolist()

        def write_early() -> None:
            host = torch.zeros(8).pin_memory()
            host.to(cuda, non_blocking=True)
            host.fill_(1)

        rows, table = ids[:4], ids.new_zeros(4, 8)

        def two_steps(num_in_flight: int) -> list[tuple[torch.Tensor, torch.cuda.Event]]:
            """Launched one after the other: their ids on the host, and what to wait for before."""
            host = HostIds(num_in_flight, 4, cuda)
            blocks, kv_slots = table[None], torch.zeros(1, 4, dtype=torch.int64, device=cuda)

            def run() -> None:
                gather_decodes(
                    rows, ids, table, blocks, 4, rows, rows, kv_slots, rows, host.turn,
                    len(host.rows),
                )  # fmt: skip
                store_sampled(rows, rows, rows, table, host.rows, host.turn)

            run()
            graph, launched = captured(run), []
            host.restart()
            for _ in range(2):
                graph.replay()
                launched.append((host.launched(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
                launched[-1][1].record()
            kept.append(graph)
            return launched

        def read_ids_early() -> None:
            (early, _), _ = two_steps(2)
            early.tolist()

        def read_ids_of_another_step() -> None:
            (_, event), (late, _) = two_steps(2)
            event.synchronize()
            late.tolist()

        def read_overwritten_ids() -> None:
            (early, event), _ = two_steps(1)
            event.synchronize()
            early.tolist()

        kept: list[torch.cuda.CUDAGraph] = []
        for ids_on_host, event in two_steps(2):  # this is right
            event.synchronize()
            ids_on_host.tolist()
        cases: dict[str, Callable[[], object]] = {
            "a number is read in a capture": lambda: captured(lambda: x[0].item()),
            "a list is sent in a capture": lambda: captured(lambda: x[[1, 2]]),
            "a number is assigned by index in a capture": lambda: captured(
                lambda: x.__setitem__(ids.long(), 1.0)
            ),
            "a capture synchronizes": lambda: captured(torch.cuda.synchronize),
            "a kernel is compiled in a capture": lambda: captured(
                lambda: store_sampled(rows, rows, rows, table)
            ),
            "a kernel gets a host tensor": lambda: store_sampled(
                rows, rows, rows, torch.zeros(4, 8).int()
            ),
            "a kernel gets a tensor with gaps": lambda: store_sampled(ids[::2], rows, rows, table),
            "a graph is replayed without its memory": replay_freed,
            "a graph's output is used after another's replay": use_overwritten,
            "host memory is read too early": read_early,
            "host memory is written too early": write_early,
            "ids are read before their event": read_ids_early,
            "ids are read after the event of another step": read_ids_of_another_step,
            "ids are overwritten before they are read": read_overwritten_ids,
            "there is no more memory": lambda: torch.empty(2**38, device=cuda),
        }
        return {name: _refusal(run) for name, run in cases.items()}


def _refusal(run: Callable[[], object]) -> str:
    try:
        run()
    except (BrokenRule, torch.OutOfMemoryError) as error:
        return str(error)
    return ""


def ranks_of(rank: int, layout: RankLayout, num_pools: int) -> TorchRanks:
    """As this rank has them, the others being only pretended. num_pools: of the model."""
    rendezvous = Rendezvous(rendezvous_memory(), layout.size)
    for other in set(range(layout.size)) - {rank}:
        rendezvous.tell(other, 0, [10**9])
        rendezvous.tell(other, 1, [10**9] * (num_pools + 1))
    board = Board(board_memory(layout.size))
    return TorchRanks(rendezvous, rank, torch.device("cuda", 0), board, layout, alone=True)


class Rehearsal:
    """One start, then requests. ranks: of which this is one."""

    def __init__(
        self,
        gpu: PretendGpu,
        model_dir: Path,
        ranks: TorchRanks | SoleDevice = SOLE_DEVICE,
        **changes: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "model": str(model_dir),
            "device": Device.CUDA,
            "load_format": LoadFormat.DUMMY,
            "num_threads": 1,
            "scheduler": SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=700),
        }
        self.gpu = gpu
        self.config = EngineConfig(**(settings | changes))
        self.executor: CudaExecutor = cuda_executor(self.config, model_dir, ranks=ranks)
        info, tier = self.executor.info, self.executor.tier
        assert tier is None or isinstance(tier, HostTier), tier
        self.tier = tier
        self.scheduler = Scheduler(
            self.config.scheduler,
            groups=info.kv_groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            num_cohorts=info.pipeline_parallel_size,
            tier=self.tier,
        )
        self._follows = ranks.rank > 0
        self._has_output_layer = ranks.pipeline.after is None
        self._launched: deque[tuple[PendingTokens, ScheduledBatch]] = deque()
        self._sampled: list[StepIds] = []
        self._num_requests = 0

    def add(
        self,
        num_tokens: int,
        *,
        n: int = 1,
        pooling: Pooling | None = None,
        start: int | None = None,
        **way: Any,
    ) -> None:
        """start: of the prompt's ids; by default another one for each request."""
        self._num_requests += 1
        sampling = SamplingParams(**({"max_tokens": 8} | way))
        start = self._num_requests if start is None else start
        request = Request(
            id=RequestId(str(self._num_requests)),
            prompt_token_ids=tuple(3 + (start * 7 + i) % 89 for i in range(num_tokens)),
            sampling=sampling,
            arrival_s=0.0,
            n=n,
            pooling=pooling,
        )
        future = self.executor.prepare(request)
        if future:
            future.result()
        self.scheduler.add(request)

    def step(self) -> None:
        """As in the engine's loop: the next step is launched before the last one is waited for."""
        if self.tier:
            self.tier.work()
        batch = self.scheduler.schedule(0.0)
        if batch:
            self._launched.append((self._launch(batch), batch))
        if not batch or len(self._launched) >= self.executor.info.max_in_flight:
            self._collect()

    def _launch(self, batch: ScheduledBatch) -> PendingTokens:
        if not self._follows:
            return self.executor.execute(batch)
        launched = self.executor.follow(batch, self._sampled)
        self._sampled = []
        return launched

    def _collect(self) -> None:
        if not self._launched:
            return
        pending, batch = self._launched.popleft()
        sampled = pending.wait()
        if not self._has_output_layer:  # what the last stage would have
            _, planned = self.scheduler._in_flight[0]  # that nothing else tells of a batch
            prompts = (PromptOutput(None, None),) * len(planned.with_prompt_output)
            token_ids = [self.gpu.answer] * sum(batch.samples)
            sampled = sampled._replace(token_ids=token_ids, prompts=prompts)
        self._sampled.append(StepIds.of(sampled))
        self.scheduler.update(sampled)

    def give_all_tokens_an_adapter(self) -> None:
        """That of the first slot: none can be loaded into memory without data."""
        max_num_seqs, cpu = self.config.scheduler.max_num_seqs, torch.device("cpu")
        self.executor.adapters = OneForAll(None, None, torch.bfloat16, cpu, max_num_seqs)

    def finish(self) -> int:
        """Steps until all requests have finished. Returns the number of steps."""
        count = 0
        while self.scheduler.has_work or self._launched:
            self.step()
            count += 1
        return count


def serve_everything(rehearsal: Rehearsal, seed: int, rounds: int) -> int:
    """Each kind of request once, then all kinds and lengths, added while others run. Returns the
    number of steps."""
    for way in WAYS:
        rehearsal.add(5, **way)
    chance, steps = random.Random(seed), rehearsal.finish()
    for _ in range(rounds):
        for way in chance.sample(WAYS, chance.randint(1, len(WAYS))):
            length = chance.choice((1, 2, 5, 17, 63, 64, 130, 333, 700, 1500))
            n = 1 if way.get("num_prompt_logprobs") else chance.choice((1, 1, 3))
            rehearsal.add(length, n=n, max_tokens=chance.choice((1, 7, 30, 90)), **way)
        if chance.random() < 0.3:
            pooling = chance.choice((Pooling.MEAN, Pooling.LAST))
            rehearsal.add(chance.randint(1, 900), pooling=pooling, max_tokens=1)
        for _ in range(chance.randint(1, 20)):
            rehearsal.step()
            steps += 1
    return steps + rehearsal.finish()


def write_model(directory: Path, **changes: Any) -> Path:
    """Llama-3.1-8B's configuration with one narrow layer, but for the changes."""
    fields = model_fields("Llama-3.1-8B", tiny=True)
    fields |= {"max_position_embeddings": 4096, "vocab_size": 8192, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(fields | changes), encoding="utf-8")
    return directory


def rehearse(
    rounds: int,
    model: str,
    rank: int | None = None,
    layout: RankLayout | None = None,
    *,
    maps_pinned: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """A start and `rounds` of `serve_everything`, then a few decode steps. rank: of a layout."""
    gpu = PretendGpu(answer=65, maps_pinned=maps_pinned)  # an "a" of the dummy tokenizer
    with gpu.installed(), tempfile.TemporaryDirectory() as directory:
        fields = MODELS[model]
        if layout is not None and (num_layers := layout.num_stages) > 1:
            fields = fields | {"num_hidden_layers": num_layers}
            if kinds := fields.get("layer_types"):
                fields["layer_types"] = (kinds * num_layers)[:num_layers]
        model_dir = write_model(Path(directory), **fields)
        ranks: TorchRanks | SoleDevice = SOLE_DEVICE
        if rank is not None and layout is not None:
            config = ModelConfig.from_dir(model_dir)
            num_pools = len(config.kv_layout(config.max_model_len).pools(config.kv_shape, 1, 1))
            ranks = ranks_of(rank, layout, num_pools)
        rehearsal = Rehearsal(gpu, model_dir, ranks, **changes)
        at_start = set(gpu.compiled)
        used, num_graphs = gpu.used_bytes, len(gpu.graphs)
        num_sizes = len(rehearsal.executor.info.graph_sizes.chunks)
        num_checked = 2 if rank is None else 0  # the check captures one of each kind before
        gpu.waits.clear()
        gpu.peak_bytes = used
        steps = serve_everything(rehearsal, rounds, rounds)
        if rehearsal.tier:
            come_back(rehearsal)
        waits = gpu.waits[:]
        decode = decode_alone(rehearsal)
        adapted = None
        if rehearsal.config.lora is not None:
            rehearsal.give_all_tokens_an_adapter()
            steps += serve_everything(rehearsal, rounds, rounds)
            waits += gpu.waits
            adapted = decode_alone(rehearsal)
        return {
            "compiled_at_start": len(at_start),
            "compiled_while_serving": [key for key in gpu.compiled if key not in at_start],
            "graphs_at_start": num_graphs,
            "graphs_while_serving": len(gpu.graphs) - num_graphs,
            "steps": steps,
            "preemptions": rehearsal.scheduler.stats().preemptions_total,
            "waits": Counter(wait.rsplit(":", 1)[0] for wait in waits),
            "bytes_at_start": used,
            "bytes_at_most": gpu.peak_bytes,
            "bytes_allowed": gpu.total_bytes * rehearsal.config.gpu_memory_utilization,
            "operations_in_chunk_graphs": [
                Counter(graph.operations)
                for graph in gpu.graphs[num_checked : num_checked + num_sizes]
            ],
            "decode": decode,
            "drafted": drafted_alone(rehearsal) if rehearsal.executor.info.takes_drafts else None,
            "adapted_decode": adapted,
            "memory_tier": memory_tier(rehearsal.tier),
        }


def come_back(rehearsal: Rehearsal) -> None:
    """A long prompt, others that take its blocks, and the same one again."""
    for start in (1, 2, 3, 1):
        rehearsal.add(1500, start=start, max_tokens=1)
        rehearsal.finish()


def memory_tier(tier: HostTier | None) -> dict[str, float]:
    """See `PlaceStats`."""
    memory = tier.stats().memory if tier else None
    return memory._asdict() if memory else {}


def decode_alone(rehearsal: Rehearsal, num_steps: int = 5) -> dict[str, Any]:
    """The total work of a few decode steps of the same sequences, which need no new blocks."""
    gpu = rehearsal.gpu
    for _ in range(3):
        rehearsal.add(2, max_tokens=30, top_p=0.9)
    for _ in range(6):
        rehearsal.step()
    for seen in (gpu.waits, gpu.uploads, gpu.downloads, gpu.launches, gpu.replays, gpu.collectives):
        seen.clear()
    for _ in range(num_steps):
        rehearsal.step()
    found = {
        "steps": num_steps,
        "waits": gpu.waits[:],
        "uploads": gpu.uploads[:],
        "launches": [launch.name for launch in gpu.launches],
        "replays": len(gpu.replays),
        "collectives": gpu.collectives[:],  # outside of graphs
        "downloads": gpu.downloads[:],
        "launches_in_graph": Counter(launch.name for launch in gpu.replays[0].launches)
        if gpu.replays
        else {},
        "operations_in_graph": gpu.replays[0].operations if gpu.replays else [],
    }
    rehearsal.finish()
    return found


def drafted_alone(rehearsal: Rehearsal, num_steps: int = 8) -> dict[str, Any]:
    """Steps of decodes with drafts, each launched before the one before is awaited. A pretended
    device gives no numbers of ids: the scheduler is told that no draft was right. From the fifth on
    a row with penalties is among them, so that ids are sampled after the graph."""
    gpu, scheduler, execute = rehearsal.gpu, rehearsal.scheduler, rehearsal.executor.execute
    for way in ({}, {"top_p": 0.9}, {"num_logprobs": 2}, {"repetition_penalty": 1.2}):
        rehearsal.add(2, max_tokens=40, **way)
    for _ in range(6):
        rehearsal.step()
    while rehearsal._launched:
        rehearsal._collect()
    for seen in (gpu.waits, gpu.uploads, gpu.downloads, gpu.launches, gpu.replays):
        seen.clear()
    before, launched = set(gpu.compiled), deque[PendingTokens]()
    for step in range(num_steps):
        batch = scheduler.schedule(0.0)
        assert batch is not None and batch.num_decodes == len(batch.slots) == 4, batch
        num = 3 if step < 4 else 4
        drafts = tuple((5,) * ((step + row) % 8 if row < 3 else 0) for row in range(num))
        drafted = batch._replace(
            slots=batch.slots[:num],
            starts=batch.starts[:num],
            samples=batch.samples[:num],
            num_tokens=tuple(1 + len(of_row) for of_row in drafts),
            num_decodes=num,
            drafts=drafts,
        )
        launched.append(execute(drafted))
        if len(launched) > 1:
            launched.popleft().wait()
        scheduler.update(SampledTokens(step=batch.step, token_ids=[gpu.answer] * 4))
    launched.pop().wait()
    found = {
        "steps": num_steps,
        "compiled": [key for key in gpu.compiled if key not in before],
        "waits": gpu.waits[:],
        "uploads": len(gpu.uploads),
        "replays": len(gpu.replays),
        "launches_in_graph": Counter(launch.name for launch in gpu.replays[0].launches),
        "operations_in_graph": gpu.replays[0].operations,
    }
    rehearsal.finish()
    return found


def main(rounds: int, flags: list[str]) -> None:
    model = next((flag for flag in flags if flag in MODELS), "llama")
    num_layers = MODELS[model].get("num_hidden_layers", 1)
    rank, layout = None, RankLayout(tensor_size=2)
    for flag in flags:
        if flag.startswith(("--rank=", "--stage-rank=")):
            rank = int(flag[-1])
            if flag.startswith("--stage"):  # of one layer each, and pools of each kind of layers
                layout = RankLayout(num_stages=3)
                num_layers = len({*MODELS[model].get("layer_types", "1")})
    # A pool that is smaller than a whole context, so that sequences are preempted. Codes take half
    # of the memory, and layers with a window keep less; of recurrent states there are several.
    is_small = model == "qwen2" or KVCacheDtype.FP8 in flags
    layer_bytes = 2**20 if model == "qwen3_5" else 2**17 if is_small else 2**18
    report = rehearse(
        rounds,
        model,
        rank,
        layout,
        maps_pinned="--unmapped" not in flags,
        block_size=16,
        kv_cache_memory_bytes=layer_bytes * num_layers,
        enforce_eager="--enforce-eager" in flags,
        kv_offload_bytes=2**22 if "--offload" in flags else None,
        lora=LoraConfig() if "--enable-lora" in flags else None,
        speculative=SpeculativeConfig() if "--drafts" in flags else None,
        kv_cache_dtype=next((kind for kind in KVCacheDtype if kind in flags), KVCacheDtype.AUTO),
    )
    print(json.dumps(report | {"rules": broken_rules()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

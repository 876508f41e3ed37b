"""Two layers in the shape of an 8B model, run as the server runs them, and a float32 reference.

The reference is plain torch on the same weights: no kernel of ours, no paged cache, no graph. Each
id is compared with the largest logit after the tokens that the executor itself had chosen.
"""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.config import LoadFormat
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.executor import CudaExecutor, DeviceModel
from penstock.engine.kernels.attention.paged.attention import PagedAttention
from penstock.engine.loading.description import describe
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.lora.store import no_adapters
from penstock.engine.models.parts.attention.rotary import rotate
from penstock.engine.models.weights import RandomWeights
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, SamplingParams, ScheduledBatch
from tests.bench.engine.models import model_fields
from tests.bench.engine.timing import compute_dtype, the_device
from tests.bench.gpu.goals import LLAMA

# Of the logits' standard deviation: how far below the largest an id's logit may be. In bfloat16,
# by torch on a CPU, logits are off by 0.013 of it, and ids by 0.02; with one other token in the
# context half of the ids are off by 0.4 and more.
_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
# Of the ids. One in twenty ties within bfloat16's precision.
_MIN_EQUAL = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """prompts: their lengths. chunk_sizes: of `ChunkSteps`."""

    prompts: tuple[int, ...]
    output: int
    max_batched_tokens: int
    chunk_sizes: tuple[int, ...]
    max_len: int
    block_size: int


# Shorter and longer than a step and a block, together and alone; 17 rows are too many for one
# kernel of `penstock.engine.kernels.linear`.
FULL = Sizes(
    prompts=(1, 3, 70, 200, 17, 129, *range(30, 41)),
    output=24,
    max_batched_tokens=256,
    chunk_sizes=(64, 128, 256),
    max_len=512,
    block_size=64,
)
TINY = Sizes(
    prompts=(1, 10),
    output=3,
    max_batched_tokens=8,
    chunk_sizes=(4, 8),
    max_len=32,
    block_size=16,
)


@contextmanager
def two_layers(tiny: bool) -> Iterator[Path]:
    """A directory with the model's config.json."""
    with tempfile.TemporaryDirectory() as directory:
        fields = model_fields(LLAMA, tiny) | {"num_hidden_layers": 2, "eos_token_id": 2}
        Path(directory, "config.json").write_text(json.dumps(fields), encoding="utf-8")
        yield Path(directory)


class SmallModel:
    def __init__(self, tiny: bool, *, graphs: bool, chunk_graphs: bool) -> None:
        self.sizes = sizes = TINY if tiny else FULL
        self.device = the_device()
        self.dtype = compute_dtype(self.device)
        self.scheduler = SchedulerConfig(
            max_num_seqs=len(sizes.prompts) + 1, max_num_batched_tokens=sizes.max_batched_tokens
        )
        with two_layers(tiny) as directory:
            self.config = ModelConfig.from_dir(directory)
            vocab_size, ends = self.config.vocab_size, self.config.eos_token_ids
            grammars = Grammars(GrammarCompiler(directory, vocab_size, ends, LoadFormat.DUMMY))
        with torch.inference_mode():
            self.llama = self._load()
            self.executor = self._build(grammars, graphs, chunk_graphs)
            self.executor.capture()

    def _load(self) -> LlamaModel:
        def empty(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device=self.device)

        return LlamaModel(
            self.config,
            RandomWeights(empty),
            PlainLinear,
            max_model_len=self.sizes.max_len,
            device=self.device,
            maps_tables=False,
        )

    def _build(self, grammars: Grammars, graphs: bool, chunk_graphs: bool) -> CudaExecutor:
        sizes, rows, device = self.sizes, self.scheduler.max_num_seqs, self.device
        num_blocks = rows * -(-sizes.max_len // sizes.block_size)
        pool = KVPools(
            self.config.kv_shape,
            KVLayout.of(self.config.windows, sizes.max_len),
            [num_blocks + 1],
            sizes.block_size,
            self.dtype,
            device,
        )
        multiprocessors = 1
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        attention = PagedAttention(
            self.config.attention_windows(sizes.block_size),
            rows,
            sizes.max_batched_tokens,
            multiprocessors,
            device,
            self.dtype,
        )
        size = PoolSize(num_blocks=num_blocks, max_model_len=sizes.max_len)
        info = describe(
            self.config, self.dtype, str(device), size, sizes.block_size, load_seconds={},
            weight_bytes=self.llama.step_weight_bytes, expert_bytes=self.llama.expert_bytes,
            kv_dtype=self.dtype,
        )  # fmt: skip
        return CudaExecutor(
            DeviceModel(
                model=FusedModel(self.llama, pool, attention, rows),
                pool=pool,
                tables=DeviceTables(rows, sizes.max_len, sizes.block_size, [num_blocks], device),
                grammars=GrammarTable(grammars, rows, self.config.vocab_size),
                info=info,
                max_num_seqs=rows,
                use_graphs=graphs,
                # On a CPU no graph is captured, but steps are padded to these as if they were.
                chunk_sizes=sizes.chunk_sizes if chunk_graphs else (),
                adapters=no_adapters(rows),
            )
        )

    def greedy(self) -> list[Request]:
        chance = random.Random(0)

        def prompt(length: int) -> tuple[int, ...]:
            return tuple(chance.choices(range(3, self.config.vocab_size), k=length))

        sampling = SamplingParams(max_tokens=self.sizes.output, temperature=0.0)
        return [
            Request(
                id=RequestId(str(i)), prompt_token_ids=prompt(n), sampling=sampling, arrival_s=0
            )
            for i, n in enumerate(self.sizes.prompts)
        ]

    def serve(
        self,
        requests: Sequence[Request],
        launch: Callable[[ScheduledBatch], PendingTokens] | None = None,
    ) -> dict[str, list[int]]:
        """The ids of each, the next step launched before the last one is waited for.

        launch: in place of the executor's `execute`. The later half of the requests come when the
        first half decode.
        """
        info, half = self.executor.info, len(requests) // 2
        scheduler = Scheduler(
            self.scheduler,
            groups=info.kv_groups,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
        )
        ids: dict[str, list[int]] = {}
        launched: PendingTokens | None = None
        for request in requests[:half]:
            scheduler.add(request)
        later = list(requests[half:])
        while scheduler.has_work or launched or later:
            batch = scheduler.schedule(0.0)
            pending = (launch or self.executor.execute)(batch) if batch else None
            for output in scheduler.update(launched.wait()) if launched else ():
                ids.setdefault(f"{output.request_id}", []).extend(output.token_ids)
            launched = pending
            if later and len(ids) == half:
                for request in later:
                    scheduler.add(request)
                later = []
        return ids


@dataclass(frozen=True, slots=True)
class Comparison:
    """worst: the largest distance of an id's logit from the largest, in standard deviations."""

    num_ids: int
    num_equal: int
    worst: float
    is_right: bool


@torch.inference_mode()
def compare(
    model: SmallModel, requests: Sequence[Request], ids: dict[str, list[int]]
) -> Comparison:
    equal, worst, num_ids = 0, 0.0, 0
    reference = Reference(model.llama)
    for request in requests:
        chosen = ids[request.id]
        tokens = (*request.prompt_token_ids, *chosen[:-1])
        logits = reference.logits(tokens, len(chosen))
        own = logits.gather(1, torch.tensor(chosen, device=logits.device)[:, None])
        below = (logits.amax(1, keepdim=True) - own) / logits.std(1, keepdim=True)
        equal += int((below == 0).sum())
        worst = max(worst, float(below.max()))
        num_ids += len(chosen)
    complete = num_ids == sum(request.sampling.max_tokens for request in requests)
    is_near = worst <= _TOLERANCE[model.dtype] and equal >= _MIN_EQUAL * num_ids
    return Comparison(num_ids, equal, worst, complete and is_near)


class Reference:
    """A whole sequence at once, in float32."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model

    def logits(self, tokens: Sequence[int], num_rows: int) -> Tensor:
        """After each of the last num_rows of these tokens: (num_rows, vocab_size)."""
        model, config = self._model, self._model.config
        ids = torch.tensor(tokens, device=model.embedding.device)
        angles = model.rotary.layers[0]
        cos, sin = (table[: len(tokens)].unsqueeze(1) for table in (angles.cos, angles.sin))
        hidden = model.embedding[ids].float()
        for layer in model.layers:
            heads = _product(layer.attention.qkv, self._norm(hidden, layer.norms.input_norm))
            heads = heads.view(len(tokens), -1, config.head_dim)
            num_kv_heads = config.attentions[0].num_kv_heads
            split = [config.num_heads, num_kv_heads, num_kv_heads]
            query, key, value = torch.split(heads, split, 1)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            hidden = hidden + _product(layer.attention.output, mixed[0].transpose(0, 1).flatten(1))
            assert layer.mlp is not None
            x = self._norm(hidden, layer.norms.mlp_norm)
            gate, up = _product(layer.mlp.gate_up, x).chunk(2, -1)
            hidden = hidden + _product(layer.mlp.down, functional.silu(gate) * up)
        return _product(model.lm_head, self._norm(hidden[-num_rows:], model.norm))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.rms_norm(x, weight.shape, weight.float(), self._model.config.norm.eps)


def _product(linear: object, x: Tensor) -> Tensor:
    assert isinstance(linear, PlainLinear) and linear.bias is None
    return x @ linear.weight.float().T

"""How many sequences a device carries: arithmetic on a model's config.json, no device needed.

The memory's size limits how many sequences of a length fit; its bandwidth, how fast a step of all
of them can be. The memory table that the server logs tells how much a start really takes.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from penstock.engine.config import KVCacheDtype, LoraConfig, Quantization
from penstock.engine.loading.devices import kept_on_gpu
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.hardware import peak_bandwidth
from penstock.engine.memory.pool.kv_layout import (
    GroupPool,
    KVLayout,
    bytes_needed,
    divide,
    longest_that_fits,
)
from penstock.engine.models.at_load.plan import Plan
from penstock.engine.models.at_load.quantize import quantization_plan
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.formats.kept import CodePolicy
from penstock.engine.models.lora.weights import max_adapter_bytes
from penstock.scheduler.config import SchedulerConfig

GB = 10**9
# An estimate for the largest step's activations, the CUDA graphs, and CUDA itself.
OTHER_BYTES = 3 * GB
# The same for what a rank has besides: NCCL's buffers, and the logits that rank 0 gathers.
RANK_BYTES = GB
CONTEXTS = (2_048, 8_192, 32_768)
# Nominal memory; the devices have a few percent more.
DEVICES = (("H100", 80), ("H200", 141))
_META = torch.device("meta")
_SCHEDULER = SchedulerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device. utilization: as `--gpu-memory-utilization`."""

    name: str
    memory_bytes: int
    utilization: float = 0.9
    other_bytes: int = OTHER_BYTES


@dataclass(frozen=True, slots=True)
class Sizing:
    """One model on one machine. dtype: of the weights. Others are as the server's flags: kv_limit
    as --kv-cache-memory-bytes; lora is None without adapters."""

    model: ModelConfig
    machine: Machine
    dtype: torch.dtype = torch.bfloat16
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    lora: LoraConfig | None = None
    max_model_len: int | None = None
    block_size: int = 64
    kv_limit: int | None = None

    def on_rank(self, num_ranks: int) -> "Sizing":
        """Returns the sizing of one of so many ranks on its device (tensor parallelism). Raises
        InvalidConfig for a model that cannot be split so."""
        if num_ranks == 1:
            return self
        other_bytes = self.machine.other_bytes + RANK_BYTES
        return replace(
            self,
            model=Shard(self.model, 0, num_ranks).config,
            machine=replace(self.machine, other_bytes=other_bytes),
        )

    @property
    def adapter_bytes(self) -> int:
        """The bytes of the slots that adapters are loaded into."""
        if self.lora is None:
            return 0
        each = max_adapter_bytes(self.model, self.lora.max_rank, self.dtype.itemsize)
        return self.lora.max_loras * each

    @property
    def weight_bytes(self) -> int:
        plan, model, itemsize = self._plan, self.model, self.dtype.itemsize
        linear = model.weight_bytes(itemsize, self._kept.num_bytes)
        return model.table_bytes(itemsize) + (plan.weight_bytes if plan else linear)

    @property
    def step_weight_bytes(self) -> int:
        """The bytes of weights that every step reads."""
        if plan := self._plan:
            return plan.step_weight_bytes
        return self.model.step_weight_bytes(self.dtype.itemsize, self._kept.num_bytes)

    @property
    def expert_bytes(self) -> int:
        """The bytes of all experts of a mixture."""
        if plan := self._plan:
            return plan.expert_bytes
        return self.model.expert_bytes(self.dtype.itemsize, self._kept.num_bytes)

    def routed_bytes(self, num_tokens: int) -> int:
        """Counts the experts that so many tokens are routed to, if all are equally likely."""
        experts = self.model.routed(self.expert_bytes)
        if experts is None:
            return 0
        return experts.expert_bytes * experts.expected(num_tokens)

    @property
    def _plan(self) -> Plan | None:
        return quantization_plan(self.quantization, self.model, self.dtype, self._kept)

    @property
    def _kept(self) -> CodePolicy:
        return kept_on_gpu(self.model, _META)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return self.model.kv_shape.bytes_per_token(self._kv_itemsize)

    @property
    def kv_bytes(self) -> int:
        """The bytes that are left for keys and values. 0 if the rest alone does not fit."""
        machine = self.machine
        share = int(machine.memory_bytes * machine.utilization)
        left = max(0, share - self.weight_bytes - self.adapter_bytes - machine.other_bytes)
        return left if self.kv_limit is None else min(left, self.kv_limit)

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens, that is asked for."""
        return min(self.max_model_len or self.model.max_model_len, self.model.longest)

    @property
    def kv_tokens(self) -> int:
        """The tokens that the KV cache holds, of sequences of the longest length."""
        if self._is_uniform:
            return self.kv_bytes // self.token_bytes
        return int(self._num_at_once(self.longest) * self.longest)

    def _num_at_once(self, context: int) -> float:
        """Sequences of so many tokens, the last one in part."""
        return min(
            num_blocks / pool.most_blocks(context)
            for num_blocks, pool in zip(self.num_blocks(), self.pools, strict=True)
        )

    def num_blocks(self) -> list[int]:
        """Returns the blocks of each pool of keys and values, as a server divides the memory; zeros
        where no sequence fits."""
        longest = self.longest_that_fits
        if not longest:
            return [0] * len(self.pools)
        return divide(
            self.pools,
            self.kv_bytes,
            max_model_len=longest,
            max_num_seqs=_SCHEDULER.max_num_seqs,
            max_step_tokens=_SCHEDULER.max_step_tokens,
        )

    @property
    def longest_that_fits(self) -> int:
        return longest_that_fits(self.pools, self.kv_bytes, self.longest)

    def bytes_of_one(self, context: int) -> int:
        """Returns those of keys and values that a sequence of so many tokens needs at once."""
        return bytes_needed(self.pools, context)

    @property
    def layout(self) -> KVLayout:
        return self.model.kv_layout(self.longest)

    @property
    def _is_uniform(self) -> bool:
        """Whether all layers keep the keys and values of all tokens."""
        return self.layout.windows == (None,) and self.layout.state is None

    @property
    def pools(self) -> list[GroupPool]:
        return self.layout.pools(self.model.kv_shape, self.block_size, self._kv_itemsize)

    def read_bytes(self, context: int) -> int:
        """Keys and values that a decode step reads of one sequence, in a layer with a window no
        more than the window, and its recurrent state."""
        layers = zip(self.model.kv_shape.heads, self.model.windows, strict=True)
        state = self.layout.state
        num_bytes = sum(
            heads.bytes_per_token(self._kv_itemsize) * min(context, window or context)
            for heads, window in layers
        )
        return num_bytes + (0 if state is None else state.num_bytes)

    @property
    def _kv_itemsize(self) -> int:
        return kv_dtype(self.kv_cache_dtype, self.dtype).itemsize

    def num_sequences(self, context: int) -> int:
        """That fit the cache at the same time. context: tokens of each, prompt and output."""
        if self._is_uniform:
            return self.kv_tokens // context
        return int(self._num_at_once(context))

    def least_tpot_s(self, num_sequences: int, context: int) -> float | None:
        """A decode step at the datasheet's bandwidth: no server can be faster. None for a device
        that configs/hardware.toml does not list."""
        bandwidth = peak_bandwidth(self.machine.name)
        if not bandwidth:
            return None
        weights = self.step_weight_bytes + self.routed_bytes(num_sequences)
        return (weights + num_sequences * self.read_bytes(context)) / bandwidth

    def slot_bytes(self, max_model_len: int) -> int:
        """Returns what each of `--max-num-seqs` takes on the device: its rows of the token and the
        block tables, and one row of logits in float32."""
        blocks = len(self.pools) * -(-max_model_len // self.block_size)
        return 4 * (max_model_len + 1 + blocks + 1 + self.model.vocab_size)

    def num_within(self, tpot_s: float, context: int, mbu: float) -> int:
        """Sequences that can run together at this TPOT if steps reach the share `mbu` of the peak
        bandwidth and memory is no limit. 0 if reading the weights alone takes longer."""
        bandwidth = peak_bandwidth(self.machine.name) or 0.0
        spare = tpot_s * bandwidth * mbu - self.step_weight_bytes
        num = max(0, int(spare / self.read_bytes(context)))
        if self.model.experts is None or not num:
            return num
        # The more sequences, the more experts: the most for which the bytes of both fit.
        return bisect.bisect_right(
            range(1, num + 1),
            spare,
            key=lambda each: self.routed_bytes(each) + each * self.read_bytes(context),
        )


def table(sizings: Sequence[Sizing], names: Sequence[str], contexts: Sequence[int]) -> str:
    """Markdown: for each context, how many sequences fit and the least TPOT with all of them."""
    head = ["model", "device", "weights", "KV bytes a token", "KV cache holds"]
    head += [f"fit at {context:,} tokens each, TPOT" for context in contexts]
    rows = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for name, sizing in zip(names, sizings, strict=True):
        machine = sizing.machine
        rows.append(
            [
                name,
                f"{machine.name}, {machine.memory_bytes / GB:.0f} GB",
                f"{sizing.weight_bytes / GB:.1f} GB",
                f"{sizing.token_bytes:,}",
                f"{sizing.kv_tokens:,} tokens",
                *(_fit(sizing, context) for context in contexts),
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _fit(sizing: Sizing, context: int) -> str:
    num = sizing.num_sequences(context)
    tpot_s = sizing.least_tpot_s(num, context)
    if not num or tpot_s is None:
        return f"{num:,}"
    return f"{num:,}, {tpot_s * 1e3:.1f} ms"

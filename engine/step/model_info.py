"""`ModelInfo`: what the loaded model is, and the least that each step must read and compute.

MBU and MFU are these bytes and operations, per second of step time, as a share of the peaks.
"""

from dataclasses import dataclass

from penstock.engine.config import GpuWay
from penstock.scheduler.drafts.limits import DraftLimits
from penstock.scheduler.groups import READ_ALIGNMENT, KVGroup, StateGroup
from penstock.scheduler.inserts import EncoderCosts
from penstock.scheduler.stats import NO_GRAPHS, GraphSizes, StepWork
from penstock.scheduler.step_model.amounts import Amounts, AttentionGroup
from penstock.scheduler.types import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts that a router chooses from for each token. Shared ones are not among them.
    num_layers: those with experts. num_experts: of one layer. expert_bytes: of one expert."""

    num_layers: int
    num_experts: int
    num_experts_per_token: int
    expert_bytes: int

    def expected(self, num_tokens: int) -> int:
        """How many experts, summed over the layers, so many tokens are routed to if each expert is
        as likely as the others."""
        missed = (1 - self.num_experts_per_token / self.num_experts) ** num_tokens
        return round(self.num_layers * self.num_experts * (1 - missed))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    """The encoder of a model that takes images: see `penstock.engine.encoders.encoder.Encoder`.

    weight_bytes: of its own weights, which are not among the model's. flops_per_patch: of its
    linear layers; flops_per_pair: of its attention, of a patch to another. bytes_per_token: of the
    rows that it makes, with all that is added to later layers. max_patches: of one insert.
    is_whole: see `Insert`. cache_bytes: for rows that are kept. default_patches: the most of an
    insert unless somebody asks for more; None where only max_patches limits them.
    """

    weight_bytes: int
    flops_per_patch: int
    flops_per_pair: int
    bytes_per_token: int
    max_patches: int
    is_whole: bool = False
    cache_bytes: int = 256 << 20
    default_patches: int | None = None

    def operations(self, num_patches: int) -> int:
        """Of an insert of so many patches, each of which attends to all."""
        return num_patches * (self.flops_per_patch + num_patches * self.flops_per_pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationInfo:
    """How the weights of linear layers were rounded at load, and what it changed.

    bits: of a weight in most layers; bits_per_weight: the mean of all that are quantized, scales
    included. group_size: weights that share a scale; None for a whole row. kl_divergence: the mean,
    in nats, of the next token's distribution from the unquantized model's; top1_agreement: how
    often, from 0 to 1, both have the same likeliest token. Both are for num_tokens tokens of a
    fixed text, and None where they were not measured.
    """

    method: str
    bits: int
    bits_per_weight: float
    group_size: int | None
    num_tokens: int = 0
    kl_divergence: float | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """A LoRA adapter whose weights are in memory.

    id: its name and a digest of its files, so that another adapter of the same name has another: by
    it requests name it, and cached prefixes are told apart. path, base_model_name: as of
    `AdapterSource`. rank: the highest of its layers.
    """

    id: str
    name: str
    path: str
    base_model_name: str | None
    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """All that the rest of the program knows of the model that an executor runs.

    weight_bytes: read once by every step that computes anything: all weights but routed experts and
    the rows of the input embedding that are not gathered. experts: None for a dense model.
    attention: the layers, grouped by window. flops_per_token: of the linear layers, for one token,
    the output layer left out; flops_per_sampled_token: of the output layer, for one row.
    kv_cache_dtype: of keys and values in memory.
    max_model_len: the longest sequence this executor was sized for.
    hidden_size: of a state. pooled_size: numbers of `PromptOutput.embedding`: as of a state, or of
    what the model's pooled head makes of one. labels: of a classifier, whose results are logits,
    one for each; else empty. problem_type: of a classifier, where config.json says it: regression,
    single_label_classification or multi_label_classification. pooling: what the model's class
    demands, if any. Peaks are the datasheet's, None for devices and types that it does not list;
    measured_bandwidth and measured_flops were measured at start.
    rates_are_doubtful: beside other programs, so that the machine may be faster.
    computed_by: on a processor, what multiplies matrices, and on how many threads, for people.
    quantization: None where weights are as the checkpoint has them. runs_ahead: whether the loop is
    to launch the next step before it waits for the last one, which costs a step of delay, and gains
    where the device computes while the host schedules. takes_drafts: whether decodes may have any,
    draft_limits: which of them and how many, where there are limits. proposes: what proposes drafts
    in the executor, as metrics name it; None where nothing does. graph_sizes: to which it pads
    steps.
    num_blocks: of the pool of the first attention group; more_blocks: of those of the others. Where
    more_blocks is empty, all layers share one pool. read_alignment: see `KVGroup`. num_states: of
    the pool of recurrent states, 0 for a model without; state_bytes: of one, in all layers.
    gpu_way: how a GPU computes it; None on a processor, and where transformers does.
    model_impl: whose implementation of the family computes it, "penstock" or "transformers".
    tensor_parallel_size: how many ranks have a part of every layer each. pipeline_parallel_size:
    how many stages there are, each of some layers. Bytes, operations, peaks and measurements are
    then those of one rank, in the last stage. encoder: of images; None where it takes text alone.
    generates: whether it continues a text. computes_whole: whether a text's tokens attend to later
    ones, as an encoder's do, so that it is computed in one step, and no beginning used again.
    """

    architecture: str
    dtype: str
    kv_cache_dtype: str
    device: str
    vocab_size: int
    hidden_size: int
    pooled_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weight_bytes: int
    attention: tuple[AttentionGroup, ...]
    flops_per_token: int
    flops_per_sampled_token: int
    peak_bandwidth_bytes_per_s: float | None = None
    measured_bandwidth_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None
    measured_flops_per_s: float | None = None
    rates_are_doubtful: bool = False
    load_seconds: dict[str, float]
    computed_by: str | None = None
    experts: RoutedExperts | None = None
    quantization: QuantizationInfo | None = None
    runs_ahead: bool = False
    takes_drafts: bool = False
    draft_limits: DraftLimits | None = None
    proposes: str | None = None
    graph_sizes: GraphSizes = NO_GRAPHS
    more_blocks: tuple[int, ...] = ()
    read_alignment: int = READ_ALIGNMENT
    num_states: int = 0
    state_bytes: int = 0
    gpu_way: GpuWay | None = None
    model_impl: str = "penstock"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    encoder: EncoderInfo | None = None
    generates: bool = True
    computes_whole: bool = False
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    pooling: Pooling | None = None

    @property
    def max_in_flight(self) -> int:
        """How many steps the loop may have launched and not collected: one in each stage, or one
        that the device computes while the host schedules the next."""
        return max(self.pipeline_parallel_size, 2 if self.runs_ahead else 1)

    @property
    def kv_groups(self) -> tuple[KVGroup | StateGroup, ...]:
        """The pools of keys and values, and then that of recurrent states, as the scheduler needs
        to know them."""
        states = (StateGroup(self.num_states),) if self.num_states else ()
        if len(self.attention) > 1 and not self.more_blocks:
            return (KVGroup(self.num_blocks), *states)
        num_blocks = (self.num_blocks, *self.more_blocks)
        groups = [
            KVGroup(num, group.window, self.read_alignment)
            for num, group in zip(num_blocks, self.attention, strict=True)
        ]
        return (*groups, *states)

    @property
    def encoder_costs(self) -> EncoderCosts | None:
        """For the scheduler; None where there is no encoder."""
        if self.encoder is None:
            return None
        flops = self.measured_flops_per_s or self.peak_flops_per_s
        operation_s = 1 / flops if flops else 0.0
        return EncoderCosts(self.encoder.bytes_per_token, self.encoder.cache_bytes, operation_s)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Those of the attention groups, in their order, for which `work_of` counts."""
        return tuple(group.window for group in self.attention)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position, all layers, as they are held in memory."""
        return sum(group.held_bytes for group in self.attention)

    def step_bytes(self, work: StepWork) -> int:
        """The least bytes that a correct step reads: once each weight that it uses, those of its
        LoRA adapters included, once the keys and values that are within each layer's window; and
        the recurrent state of each sequence twice, because it must write that too.

        Where work.num_experts is not known, those count that `RoutedExperts.expected` tells. The
        attention of plain torch (`gathered_attention`) reads whole contexts whatever the window.
        """
        num_bytes = self._weight_bytes(work) + 2 * self.state_bytes * work.num_sequences
        for group, attention in zip(self.attention, work.attention, strict=True):
            num_bytes += group.kv_bytes_per_token * attention.context_tokens
        return num_bytes

    def step_flops(self, work: StepWork) -> int:
        """The floating-point operations of a correct step."""
        return (
            self.flops_per_token * (work.num_prefill_tokens + work.num_decode_tokens)
            + self.flops_per_sampled_token * (work.num_sampled + work.num_scored)
            + sum(
                group.flops_per_pair * attention.pairs
                for group, attention in zip(self.attention, work.attention, strict=True)
            )
        )

    def amounts(self, work: StepWork) -> Amounts:
        """Returns the amounts from which a step model predicts the step's time."""
        flops = 0
        all_bytes = 2 * self.state_bytes * work.num_sequences
        decode_bytes = 2 * self.state_bytes * (work.num_sequences - work.num_chunks)
        for group, attention in zip(self.attention, work.attention, strict=True):
            all_bytes += group.kv_bytes_per_token * attention.context_tokens
            decode_bytes += group.kv_bytes_per_token * attention.decode_context_tokens
            flops += group.flops_per_pair * (attention.pairs - attention.decode_context_tokens)
        return Amounts(
            work.num_prefill_tokens + work.num_decode_tokens + work.num_padding,
            self._weight_bytes(work),
            decode_bytes,
            all_bytes - decode_bytes,
            flops,
            work.num_sequences,
            work.num_chunks,
            work.num_sampled + work.num_scored,
            work.num_prefill_tokens,
        )

    def _weight_bytes(self, work: StepWork) -> int:
        """Counts the weights that the step uses."""
        num_bytes = self.weight_bytes + work.adapter_bytes
        if self.experts is None:
            return num_bytes
        num_experts = work.num_experts
        if num_experts is None:
            num_tokens = work.num_prefill_tokens + work.num_decode_tokens
            num_experts = self.experts.expected(num_tokens)
        return num_bytes + self.experts.expert_bytes * num_experts

"""Logits to token ids: penalties, bias, temperature, filters, and a counter-based random draw.

The sampler owns the sampling parameters of each slot's request (`assign`). It never writes to the
caller's logits.

**Order**, as in vLLM except for the third: bias; repetition, frequency and presence penalties, and
DRY; grammar masks and token bans (a grammar that has ended forces its end token, even if it is
banned); temperature; min-p and top-k; top-p of what those leave; XTC of what that leaves. Logprobs
are of the raw logits, before all of this.

**A filter is a threshold**, never a ranking: it keeps every token at least as likely as the last
one that it must keep. All tokens tied at the edge of a top-k or a nucleus survive, so the survivors
depend neither on the order of a sort nor on the device.

**The draw** is an inverse CDF in two levels (a block of 64 ids by the blocks' sums, then an id of
the block), from two uniforms of the row's (seed, position) alone: the same ids whatever the other
rows of the batch, in any row and slot, and after a preemption. Sums are compared as integers, which
are exact in any order: u near 1 cannot overrun, and an id of weight 0 is never drawn. Gumbel noise
would need 151,936 random numbers per row instead of two: on one AVX-512 core (torch 2.13, batch 1)
torch's own exponential noise takes 2.8 ms, the draw below 0.09 ms, the softmax 0.09 ms.

On a CPU with a compiled step, `engine/native/step/draw.h` does all of this but bias, penalties,
masks and bans, a row at a time: the same ids, but where a uniform falls between two roundings.

**The generator** is SplitMix64 (Steele, Lea, Flood 2014; constants of Vigna's public-domain code):
position p uses outputs 2p and 2p+1 of the stream that starts at mix(seed). It can start at any
point, and takes some 20 torch operations on 64-bit integers, 0.04 ms a step whatever the batch;
Philox4x32-10 would do as well, but its ten rounds of 32-bit words take 0.16 ms.

**Invalid logits**: a row in which NaN or +inf is among the logits gives `INVALID_ID`, and the host
learns of it with the ids. One that a grammar or a ban excludes may pass. A row in which every logit
is -inf gives id 0. Logprobs take NaN as -inf, and +inf as the largest float.
"""

import math
from collections.abc import Callable
from operator import is_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.engine.memory.host import tensor_to_device, to_device, to_host
from penstock.engine.sampling.dry import DryPenalty
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.sampling.token_bans import TokenBans, banned_by, has_token_bans
from penstock.scheduler.types import FinishReason, SamplingParams, TokenLogprobs

# The id of a row whose logits are invalid.
INVALID_ID = -1
# Ids in a block, which is summed or maximised as a unit. At 151,936, 64 balances the two levels: a
# row's block maxima take 0.02 ms and leave 2,374 numbers for the second level.
_BLOCK = 64
# A lower temperature is greedy (vLLM's bound): its reciprocal would exceed float32's precision.
MIN_TEMPERATURE = 1e-5
# Logits that are processed at a time. On a CPU, 2 MiB of them are still cached when they are read
# again; on CUDA fewer launches matter more, and three buffers of 64 MiB bound the memory.
_CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**24}
# Most nuclei are smaller than this; a larger one needs a bisection, some 20 times as slow.
_NUCLEUS_GUESS = 128
# Weights are compared as integers with the largest at 2**38: 2**14 of them sum to less than 2**53.
_INTEGER_ONE = 2.0**38

_LARGEST_FLOAT = torch.finfo(torch.float32).max
_GOLDEN = 0x9E3779B97F4A7C15
_XTC = 0x5851F42D4C957F2D  # makes other random numbers of the same seed
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class _Plan(NamedTuple):
    """A row's needs besides an argmax, or a draw that is compiled. Rows with the same plan are
    sampled together."""

    draws: bool
    biased: bool
    penalised: bool
    constrained: bool
    bans_tokens: bool
    dry: bool
    xtc: bool
    min_p: bool
    top_k: bool
    top_p: bool


class _Step(NamedTuple):
    """The arguments of `sample_ids`, and tensors made of them: slot_ids (S,); uniforms (S, 2),
    or none where no row draws."""

    logits: Tensor
    slots: list[int]
    lengths: list[int]
    token_table: Tensor
    prompt_lengths: list[int]
    slot_ids: Tensor
    uniforms: Tensor


def argmax(x: Tensor) -> Tensor:
    """The first maximum of each row, (S,); INVALID_ID where NaN or +inf is among its numbers. By
    blocks, four times as fast on CPU as torch's."""
    if x.is_cuda or x.shape[1] % _BLOCK:
        best, ids = x.max(-1)
    else:
        best, block = _blocks(x).amax(-1).max(-1)
        ids = block * _BLOCK + _block_of(x, block).argmax(-1)
    return torch.where(best < torch.inf, ids, INVALID_ID)  # a NaN is the maximum of its row


class DrawTables(NamedTuple):
    """What a draw needs of each slot, (slots, 1) each. inverse_temperature: 0 for the likeliest."""

    seed: Tensor  # int64, as `mixed_seed`
    top_k: Tensor  # int64
    inverse_temperature: Tensor
    top_p: Tensor
    log_min_p: Tensor


ReadLogprobs = Callable[[], list[TokenLogprobs | None]]


class Draw(Protocol):
    """Draws an id of each row, but for those of slot -1, whose ids may be anything: (S,) int64. The
    lengths are the positions that are drawn."""

    def __call__(
        self, logits: Tensor, slots: list[int], lengths: list[int], tables: DrawTables
    ) -> Tensor: ...


class Sampler:
    """Per-slot tables of sampling parameters, and `sample`, which reads them."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarTable | None = None,
        draw: Draw | None = None,
    ) -> None:
        """grammars: the executor's, which starts and advances them; None if it has none.
        draw: one that is compiled; without it, torch's operators draw."""

        def table(dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(max_num_seqs, 1, dtype=dtype, device=device)

        self._vocab_size = vocab_size
        self._device = device
        self._draw = draw
        self._chunk = max(1, _CHUNK_LOGITS[device.type] // vocab_size)
        self._buffers = torch.empty(3, 0, 0)
        self._plans: list[_Plan | None] = [None] * max_num_seqs
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * max_num_seqs
        self._bans: list[TokenBans | None] = [None] * max_num_seqs
        self._dry: list[DryPenalty | None] = [None] * max_num_seqs
        self._xtc = table(), table()  # probability and threshold
        self._last_bans: tuple[tuple[object, ...], TokenBans] | None = None
        self._grammars = grammars
        self._masks = _GrammarMasks(grammars, device) if grammars else None
        self._num_logprobs: dict[int, int] = {}
        self._max_top_k = [0] * max_num_seqs
        self._tables = DrawTables(table(torch.int64), table(torch.int64), table(), table(), table())
        self._repetition, self._presence, self._frequency = table(), table(), table()

    def assign(self, slot: int, sampling: SamplingParams, seed: int) -> None:
        """A sequence enters `slot`. A bias on ids outside the vocabulary is ignored."""
        # top_k 1 is an argmax even if two logits tie, of which a threshold would keep both.
        draws = sampling.temperature >= MIN_TEMPERATURE and sampling.top_k != 1
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        bias = [(i, value) for i, value in sampling.logit_bias if 0 <= i < self._vocab_size]
        plan = _Plan(
            draws=draws,
            biased=bool(bias),
            penalised=sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0,
            constrained=sampling.grammar is not None and self._grammars is not None,
            bans_tokens=has_token_bans(sampling),
            dry=sampling.dry is not None,
            xtc=draws and sampling.xtc is not None,
            min_p=draws and sampling.min_p > 0.0,
            top_k=draws and top_k > 0,
            top_p=draws and sampling.top_p < 1.0,
        )
        if self._draw is not None and not plan.xtc:  # which filters too
            plan = plan._replace(draws=False, min_p=False, top_k=False, top_p=False)
        self._plans[slot] = plan if any(plan) else None
        self._num_logprobs.pop(slot, None)
        if sampling.num_logprobs is not None:
            self._num_logprobs[slot] = sampling.num_logprobs
        if plan.biased:
            ids, values = zip(*bias, strict=True)
            weights = to_device(values, torch.float32, self._device)
            self._bias[slot] = (self._tensor(ids), weights)
        if plan.bans_tokens:
            self._bans[slot] = self._bans_of(sampling)
        if sampling.dry:
            self._dry[slot] = DryPenalty(sampling.dry, self._vocab_size, self._device)
        if sampling.xtc:
            for column, value in zip(self._xtc, sampling.xtc, strict=True):
                column[slot] = value
        tables = self._tables
        tables.seed[slot] = _signed(mixed_seed(seed))
        tables.top_k[slot] = self._max_top_k[slot] = top_k
        tables.inverse_temperature[slot] = 1.0 / sampling.temperature if draws else 0.0
        tables.top_p[slot] = sampling.top_p
        tables.log_min_p[slot] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self._repetition[slot] = sampling.repetition_penalty
        self._presence[slot] = sampling.presence_penalty
        self._frequency[slot] = sampling.frequency_penalty

    def _bans_of(self, sampling: SamplingParams) -> TokenBans:
        """The answers of a request, and its prompts, share what they ban: it is made once, if they
        come one after another."""
        last = self._last_bans
        if last and all(map(is_, last[0], banned_by(sampling))):
            return last[1]
        bans = TokenBans(sampling, self._vocab_size, self._device)
        self._last_bans = banned_by(sampling), bans
        return bans

    def sample(
        self,
        logits: Tensor,
        slots: list[int],
        lengths: list[int],
        token_table: Tensor,
        prompt_lengths: list[int],
    ) -> tuple[Tensor, list[TokenLogprobs | None] | None]:
        """`sample_ids`, and logprobs if a row requests them, for which the host waits."""
        ids = self.sample_ids(logits, slots, lengths, token_table, prompt_lengths)
        if self._num_logprobs.keys().isdisjoint(slots):
            return ids, None
        return ids, self.logprobs(logits, slots, ids)()

    def sample_ids(
        self,
        logits: Tensor,
        slots: list[int],
        lengths: list[int],
        token_table: Tensor,
        prompt_lengths: list[int],
    ) -> Tensor:
        """One id per row, (S,) int64 on the device, without waiting for it.

        logits: (S, V) float32. Row i belongs to slots[i], whose first lengths[i] tokens are in
        token_table[slots[i]], the first prompt_lengths[i] of them the prompt; so lengths[i] is the
        position being sampled.
        """
        plans = [self._plans[slot] for slot in slots]
        if any(plans):
            slot_ids = self._tensor(slots)
            uniforms = torch.empty(0, 2)
            if any(plan and plan.draws for plan in plans):
                keys = self._tables.seed.index_select(0, slot_ids)
                uniforms = _uniforms(keys, self._tensor(lengths))
            step = _Step(logits, slots, lengths, token_table, prompt_lengths, slot_ids, uniforms)
            return self._sample_by_plan(step, plans)
        return self._unadjusted(logits, slots, lengths)

    def draws_alone(self, slots: list[int]) -> DrawTables | None:
        """What `draw` needs; None where it is not all that samples these."""
        if self._draw is None or any(self._plans[slot] for slot in slots):
            return None
        return self._tables

    def _unadjusted(self, logits: Tensor, slots: list[int], lengths: list[int]) -> Tensor:
        """One id for each row that has no plan, or whose plan is done."""
        if self._draw is not None:
            return self._draw(logits, slots, lengths, self._tables)
        return argmax(logits)

    def _sample_by_plan(self, step: _Step, plans: list[_Plan | None]) -> Tensor:
        """Samples the rows of each plan together, so that no row costs what another requested."""
        rows_by_plan: dict[_Plan, list[int]] = {}
        for row, plan in enumerate(plans):
            if plan is not None:
                rows_by_plan.setdefault(plan, []).append(row)
        order: list[int] = []
        chosen: list[Tensor] = []
        for plan, rows in rows_by_plan.items():
            order += rows
            parts = (rows[i : i + self._chunk] for i in range(0, len(rows), self._chunk))
            chosen += [self._choose(plan, step, part) for part in parts]
        if len(rows_by_plan) == 1 and len(order) == len(plans):
            return torch.cat(chosen)
        ids = torch.empty_like(step.slot_ids)
        if len(order) < len(plans):
            # Torch's argmax is of all rows: it is cheaper than gathering those without a plan.
            without = [-1 if plan else slot for slot, plan in zip(step.slots, plans, strict=True)]
            ids = self._unadjusted(step.logits, without, step.lengths)
        return ids.index_copy_(0, self._tensor(order), torch.cat(chosen))

    def _choose(self, plan: _Plan, step: _Step, rows: list[int]) -> Tensor:
        """One id for each of these rows, which have the same plan: (R,)."""
        index = self._tensor(rows)
        slots = step.slot_ids.index_select(0, index)
        x, weights, kept = self._scratch(len(rows))
        torch.index_select(step.logits, 0, index, out=x[:, : self._vocab_size])
        if plan.biased:
            self._add_bias(x, [step.slots[row] for row in rows])
        if plan.penalised:
            self._add_penalties(x, step, rows, slots)
        if plan.dry:
            for x_row, row in zip(x, rows, strict=True):
                dry, tokens = self._dry[step.slots[row]], step.token_table[step.slots[row]]
                assert dry is not None, row
                dry.apply(x_row[: self._vocab_size], tokens, step.lengths[row])
        if plan.constrained:
            assert self._masks
            self._masks.apply(x[:, : self._vocab_size], [step.slots[row] for row in rows])
        if plan.bans_tokens:
            self._ban_tokens(x, step, rows)
        if not plan.draws:
            lengths = [step.lengths[row] for row in rows]
            return self._unadjusted(x, [step.slots[row] for row in rows], lengths)
        max_top_k = max(self._max_top_k[step.slots[row]] for row in rows)
        is_valid = self._weigh(plan, x, slots, max_top_k, weights, kept)
        if plan.xtc:
            self._exclude_top_choices(weights, kept, step, index)
        ids = _draw(weights, step.uniforms.index_select(0, index))
        return ids if is_valid is None else torch.where(is_valid, ids, INVALID_ID)

    def _scratch(self, num_rows: int) -> Tensor:
        """Logits, weights and a mask: (3, R, V rounded up to blocks), -inf past V. Reused between
        steps: page faults of new memory can cost more than the computation."""
        if self._buffers.shape[1] < num_rows:
            num_ids = -(-self._vocab_size // _BLOCK) * _BLOCK
            size = (3, min(2 * num_rows, self._chunk), num_ids)
            self._buffers = torch.full(size, -torch.inf, device=self._device)
        return self._buffers[:, :num_rows]

    def _add_bias(self, x: Tensor, slots: list[int]) -> None:
        for row, slot in zip(x, slots, strict=True):
            bias = self._bias[slot]
            assert bias is not None, slot
            row.index_add_(0, *bias)

    def _add_penalties(self, x: Tensor, step: _Step, rows: list[int], slots: Tensor) -> None:
        lengths = [step.lengths[row] for row in rows]
        _penalise(
            x,
            step.token_table[:, : max(lengths)].index_select(0, slots).long(),
            self._tensor(lengths).unsqueeze(1),
            self._tensor([step.prompt_lengths[row] for row in rows]).unsqueeze(1),
            self._repetition[slots],
            self._presence[slots],
            self._frequency[slots],
        )

    def _ban_tokens(self, x: Tensor, step: _Step, rows: list[int]) -> None:
        for x_row, row in zip(x, rows, strict=True):
            slot = step.slots[row]
            if self._grammars and self._grammars.must_end(slot):
                continue
            bans = self._bans[slot]
            assert bans is not None, slot
            tokens = step.token_table[slot]
            bans.apply(
                x_row[: self._vocab_size], tokens, step.lengths[row], step.prompt_lengths[row]
            )

    def _weigh(
        self, plan: _Plan, x: Tensor, slots: Tensor, max_top_k: int, weights: Tensor, kept: Tensor
    ) -> Tensor | None:
        """Writes to `weights` what each id is drawn in proportion to, 0 if a filter excludes it.

        x: (R, V), overwritten. kept: like x, scratch memory. Returns which rows are valid, (R,), or
        None where all are.
        """
        peak = x.amax(-1, keepdim=True)
        is_valid = None
        if x.is_cuda or not bool(peak.isfinite().all()):
            is_valid = peak.squeeze(1) < torch.inf  # a NaN is not
            peak = _repair(x).amax(-1, keepdim=True)
        # Shift before scaling: the other way round a large logit could overflow.
        x.sub_(peak).mul_(self._tables.inverse_temperature.index_select(0, slots))
        torch.softmax(x, -1, out=weights)
        if plan.min_p or plan.top_k:
            floor = self._tables.log_min_p[slots]
            if plan.top_k:
                floor = floor.maximum(
                    _largest(x, max_top_k).gather(1, self._tables.top_k[slots] - 1)
                )
            # A mask of floats is six times as fast as masked_fill.
            weights.mul_(torch.ge(x, floor, out=kept))
        if plan.top_p:
            floor = _nucleus_floor(weights, self._tables.top_p[slots])
            weights.mul_(torch.ge(weights, floor, out=kept))
        return is_valid

    def _exclude_top_choices(
        self, weights: Tensor, kept: Tensor, step: _Step, index: Tensor
    ) -> None:
        """Writes 0 to the weights, (R, V), that XTC excludes. index: the rows of the step."""
        slots = step.slot_ids.index_select(0, index)
        probability, threshold = (column.index_select(0, slots) for column in self._xtc)
        lengths = self._tensor(step.lengths).index_select(0, index)
        keys = self._tables.seed.index_select(0, slots) ^ _XTC
        is_chosen = _uniforms(keys, lengths)[:, :1] < probability
        likely = weights >= threshold * _block_sums(weights).sum(-1, keepdim=True)
        least = torch.where(likely, weights, torch.inf).amin(-1, keepdim=True)
        weights.mul_(torch.logical_not(likely & (weights > least) & is_chosen, out=kept))

    def logprobs(self, logits: Tensor, slots: list[int], ids: Tensor) -> ReadLogprobs:
        """Launches what computes those of the raw logits, for the rows that request them. ids:
        (S,) int64. Returns what reads them once the device has passed an event after this."""
        parts = []
        requesting = [row for row, slot in enumerate(slots) if slot in self._num_logprobs]
        for start in range(0, len(requesting), self._chunk):
            part = requesting[start : start + self._chunk]
            rows = self._tensor(part)
            x = raw_logprobs(logits.index_select(0, rows).float())
            nums = [min(self._num_logprobs[slots[row]], self._vocab_size) for row in part]
            own = x.gather(1, ids[rows].clamp(min=0).unsqueeze(1)).squeeze(1)
            best = x.topk(max(nums))
            parts.append((part, nums, to_host(own), to_host(best.indices), to_host(best.values)))

        def read() -> list[TokenLogprobs | None]:
            report: list[TokenLogprobs | None] = [None] * len(slots)
            for part, nums, *found in parts:
                columns = [each.tolist() for each in found]
                for row, num, own, top_ids, top in zip(part, nums, *columns, strict=True):
                    pairs = zip(top_ids[:num], top[:num], strict=True)
                    report[row] = TokenLogprobs(own, tuple(pairs))
            return report

        return read

    def _tensor(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return to_device(values, torch.int64, self._device)


class _GrammarMasks:
    """A `GrammarTable`'s bits as a term to add to logits: 0 for allowed ids, else -inf. It uses a
    table of all byte values, which takes a third of the time of 32 shifts of each word."""

    def __init__(self, grammars: GrammarTable, device: torch.device) -> None:
        self._grammars = grammars
        self._bytes = torch.frombuffer(grammars.memory, dtype=torch.uint8)
        self._bytes = self._bytes.view(-1, 4 * grammars.words_per_row)
        bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
        self._bytes_as_terms = torch.where(bits > 0, 0.0, -torch.inf).to(device)

    def apply(self, x: Tensor, slots: list[int]) -> None:
        """Adds to x in place: (R, V), row i for slots[i]."""
        self._grammars.wait()
        masks = tensor_to_device(self._bytes[slots].to(torch.int32), x.device)
        x += self._bytes_as_terms.index_select(0, masks.view(-1)).view(len(slots), -1)[
            :, : x.shape[1]
        ]


def raw_logprobs(logits: Tensor) -> Tensor:
    """log_softmax: never NaN, and -inf only for ids of probability 0. Overwrites the logits."""
    return _repair(logits).log_softmax(-1)


def _repair(x: Tensor) -> Tensor:
    """Replaces invalid logits in place: see the module's last paragraph."""
    x.nan_to_num_(nan=-torch.inf, posinf=_LARGEST_FLOAT, neginf=-torch.inf)
    x[:, 0].masked_fill_(x.amax(-1) == -torch.inf, 0.0)
    return x


def _penalise(
    x: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """In place. Repetition applies to every token seen; presence and frequency to the output's.

    x: (R, V). tokens: (R, L), of which the first lengths[i] of row i count. The rest: (R, 1).
    Every occurrence of a token writes the same value, so the order does not matter.
    """
    positions = torch.arange(tokens.shape[1], device=x.device)
    is_known = positions < lengths
    is_output = (is_known & (positions >= prompt_lengths)).float()
    ids = torch.where(is_known, tokens, tokens[:, :1])
    counts = torch.zeros_like(x).scatter_add_(1, ids, is_output).gather(1, ids)
    seen = x.gather(1, ids)
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= frequency * counts + presence * (counts > 0)
    x.scatter_(1, ids, seen)


def _blocks(x: Tensor) -> Tensor:
    """A view: (R, V) as (R, V / 64, 64)."""
    return x.view(x.shape[0], x.shape[1] // _BLOCK, _BLOCK)


def _block_of(x: Tensor, block: Tensor) -> Tensor:
    """Block block[i] of row i: (R, 64)."""
    first = torch.arange(0, x.numel() // _BLOCK, x.shape[1] // _BLOCK, device=x.device)
    return x.reshape(-1, _BLOCK).index_select(0, first + block)


def _largest(x: Tensor, n: int) -> Tensor:
    """Each row's n largest values, descending. They are in the n blocks with the largest maxima."""
    num_blocks = x.shape[1] // _BLOCK
    if n * 2 >= num_blocks:
        return x.topk(min(n, x.shape[1])).values
    blocks = _blocks(x).amax(-1).topk(n, sorted=False).indices
    blocks += torch.arange(x.shape[0], device=x.device).unsqueeze(1) * num_blocks
    candidates = x.view(-1, _BLOCK).index_select(0, blocks.view(-1)).view(x.shape[0], -1)
    return candidates.topk(n).values


def _nucleus_floor(weights: Tensor, top_p: Tensor) -> Tensor:
    """The largest weight t such that ids of weight t or more have top_p of the mass: (R, 1)."""
    mass = top_p * _block_sums(weights).sum(-1, keepdim=True, dtype=torch.float64)
    if weights.is_cuda:
        return _bisect_floor(weights, mass)
    best = _largest(weights, _NUCLEUS_GUESS)
    index = (best.cumsum(-1, dtype=torch.float64) < mass).sum(-1, keepdim=True)
    floor = best.gather(1, index.clamp(max=best.shape[1] - 1))
    larger = (index.squeeze(1) == best.shape[1]).nonzero().squeeze(1)
    if len(larger):
        floor[larger] = _bisect_floor(weights[larger], mass[larger])
    return floor


def _bisect_floor(weights: Tensor, mass: Tensor) -> Tensor:
    """`_nucleus_floor` without a sort, on the floats' bits, which have the same order."""
    high = weights.amax(-1, keepdim=True).view(torch.int32)
    low, kept = torch.zeros_like(high), torch.empty_like(weights)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        torch.ge(weights, middle.view(torch.float32), out=kept)
        enough = kept.mul_(weights).sum(-1, keepdim=True) >= mass
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return low.view(torch.float32)


def _block_sums(weights: Tensor) -> Tensor:
    return _blocks(weights).sum(-1)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One id per row in proportion to its weight: (R,). uniforms: (R, 2) float64 in [0, 1)."""
    block = _pick(_block_sums(weights), uniforms[:, :1])
    return block * _BLOCK + _pick(_block_of(weights, block), uniforms[:, 1:])


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index per row in proportion to its weight, never of weight 0: (R,). weights: (R, n), with
    a positive one in every row. uniform: (R, 1) float64 in [0, 1)."""
    scale = _INTEGER_ONE / weights.amax(-1, keepdim=True).double()
    reached = (weights * scale).long().cumsum(-1)
    target = (uniform * reached[:, -1:]).long()
    return torch.searchsorted(reached, target, right=True).squeeze(1)


def _uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Two numbers in [0, 1) per row: (R, 2) float64. keys: (R, 1), mixed seeds. positions: (R,)."""
    z = 2 * positions.unsqueeze(1) + torch.arange(1, 3, device=positions.device)
    z = keys + z * _signed(_GOLDEN)
    for shift, factor in _MIX:
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return (z >> 11 & (1 << 53) - 1).double() * 2.0**-53


def mixed_seed(seed: int) -> int:
    """SplitMix64's output function, on the low 64 bits of a Python integer."""
    z = seed % 2**64
    for shift, factor in _MIX:
        z = (z ^ z >> shift) * factor % 2**64
    return z


def failed_rows(token_ids: list[int], by_grammar: frozenset[int]) -> dict[int, FinishReason]:
    """The rows whose sequences cannot continue, and why. by_grammar: what `GrammarTable.advance`
    returned for them."""
    failed = dict.fromkeys(by_grammar, FinishReason.ERROR)
    if min(token_ids, default=0) < 0:
        for row, token_id in enumerate(token_ids):
            if token_id == INVALID_ID:
                failed[row] = FinishReason.INVALID_LOGITS
    return failed


def _signed(word: int) -> int:
    """The int64 with the same 64 bits, for torch."""
    return word - 2**64 if word >= 2**63 else word

"""The frozen types that packages exchange: requests, the work of a step, and its results.

Nothing here has behaviour. Types that are made in every step are NamedTuples, because a frozen
dataclass costs three times as much to make.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from penstock.scheduler.prompt_logprobs import PackedLogprobs

RequestId = NewType("RequestId", str)


class Pooling(StrEnum):
    """Which states of the last layer make the embedding of a prompt."""

    LAST = "last"  # that of its last token
    MEAN = "mean"  # the mean over all its tokens
    FIRST = "cls"  # that of its first token, by which encoders are trained to stand for the text


class FinishReason(StrEnum):
    STOP = "stop"  # it sampled one of its stop token ids
    LENGTH = "length"  # max_tokens, or the model's context, is used up
    ABORT = "abort"  # the client disconnected, or the server ended it
    ERROR = "error"  # its grammar failed
    INVALID_LOGITS = "invalid_logits"  # the model's logits were NaN or infinite


class Dry(NamedTuple):
    """A penalty on repetitions: see `penstock.engine.sampling.dry`. last_n: how many of the last
    tokens it looks at, the prompt's too; -1 for all. breaker_ids: no repetition goes over them."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breaker_ids: tuple[int, ...]


class Xtc(NamedTuple):
    """With this probability all ids that are at least `threshold` likely are excluded but the least
    likely of them, after the other filters."""

    probability: float
    threshold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when they end. Validated at the wire, trusted here.

    max_tokens 0: no answer, only the prompt's outputs. num_prompt_logprobs: None for none; k for
    the logprobs of every prompt token but the first and of the k most likely ones in its place.
    temperature 0 is greedy. top_k 0 and top_p 1.0 keep the whole vocabulary. num_logprobs: None
    for none, 0 for the sampled token's alone, k for those of the k most likely besides.
    min_tokens: no stop token id is sampled before this many tokens. bad_words: token sequences that
    the answer never contains. allowed_token_ids, unless empty: the only ids that can be sampled.
    seed, together with the position, determines the random numbers, so that they do not depend on
    the other rows of the batch; the server draws one where the client gave none.
    grammar: what the output must match, in llguidance's notation, or None for any text. The server
    has compiled it once, so it does compile. grammar_bytes: about what it takes in memory once it
    is compiled. grammar_to_the_end: end-of-sequence ids are sampled only where the grammar allows
    nothing else.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry: Dry | None = None
    xtc: Xtc | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: str | None = None
    grammar_bytes: int = 0
    grammar_to_the_end: bool = False


class Insert(NamedTuple):
    """Rows that an encoder makes of an image, which stand in a prompt in place of embedded tokens.

    start, num_tokens: which of the prompt's tokens, placeholders, these are. digest: of the content
    and of how it is read (16 bytes, blake2b): equal digests mean equal rows. grid: frames, rows and
    columns of tokens, (t, h, w), of which positions are made (M-RoPE); (1, 1, num_tokens) where a
    model has none.
    content: what the encoder reads (uint8 patches), patches: its shape, (num_patches, bytes of
    one), patch_grid: frames, rows and columns of these. operations: floating-point operations that
    the encoder does. is_whole: its tokens see each other, so that they are computed in one chunk.
    """

    start: int
    num_tokens: int
    digest: bytes
    grid: tuple[int, int, int]
    content: bytes = b""
    patches: tuple[int, int] = (0, 0)
    patch_grid: tuple[int, int, int] = (1, 1, 1)
    operations: int = 0
    is_whole: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class ResumedAnswer(NamedTuple):
    """An answer that an earlier engine began, as far as its tokens have been returned.

    token_ids: those of the answer alone. first_scheduled_s, num_cached_tokens: what the earlier
    engine reported of its first step; None and 0 where it has not run.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    token_ids: tuple[int, ...] = ()
    first_scheduled_s: float | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and `n` answers to it.

    arrival_s is in the scheduler's clock. A lower priority runs earlier (vLLM's order), under the
    `priority` policy alone. tenant: who shares with whom under the `fair` policy. ttft_target_s,
    itl_target_s: its own targets, in place of the server's (see SchedulerConfig). adapter: the name
    of a LoRA adapter, None for the base model.
    Requests share cached prefixes only under an equal cache_salt and an equal adapter.
    prediction: what the answer may be, in ids, or part of it: drafts are looked up there too.
    max_drafts: of a row of a step; None for as many as the engine may have.
    resumed: of a request that an earlier engine began, the answers that have not ended, by index;
    None where all n start here. inserts: of its prompt, ascending, none overlapping another.
    num_first: tokens of the prompt's first text, with the special ones that belong to it, where a
    tokenizer joins two and an encoder tells them apart; 0: all are of it.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    n: int = 1
    priority: int = 0
    tenant: str = ""
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    cache_salt: str = ""
    pooling: Pooling | None = None
    adapter: str | None = None
    prediction: tuple[int, ...] = ()
    max_drafts: int | None = None
    resumed: tuple[ResumedAnswer, ...] | None = None
    inserts: tuple[Insert, ...] = ()
    num_first: int = 0


class PromptOutputRequest(NamedTuple):
    """Which outputs a prompt has: see SamplingParams and Request. Never both None."""

    num_logprobs: int | None
    pooling: Pooling | None


class SlotAssignment(NamedTuple):
    """A sequence enters a slot: all that an executor needs to know before its first row runs.

    token_ids: every id known so far, the prompt first and then, after a preemption or in another
    engine than it began in, its outputs.
    tables: its block table in each group of layers (`scheduler.groups`), in logical order; entries
    that no row reads are 0. That of a group with a recurrence has one entry, the sequence's state.
    seed: this sample's own. prompt_request: the outputs still missing of its prompt; its rows then
    begin at the first token, unless that is pooling LAST alone. adapter: see Request. What an
    executor keeps of an earlier assignment of the slot is void. inserts: see Request; their content
    is left out, as the executor has it from `Executor.prepare`. num_first: see Request.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    tables: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    seed: int
    prompt_request: PromptOutputRequest | None = None
    adapter: str | None = None
    inserts: tuple[Insert, ...] = ()
    num_first: int = 0


class TableUpdate(NamedTuple):
    """Entry `index` of the block table of `slot` becomes `block_id`: the sequence has grown. group:
    of layers, as those of the scheduler's groups."""

    slot: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    block_id: int
    group: int = 0


class BlockCopy(NamedTuple):
    """Block `target` gets the content of block `source` before this step writes anything.

    Both are in the pool of one group of layers; the copies of a step are made at once, so that none
    reads what another writes.
    """

    source: int
    target: int
    group: int = 0


class StateSnapshot(NamedTuple):
    """State `state`, of the pool of recurrent states, becomes what the sequence in row `row` has
    after the first num_tokens tokens of that row; where some of these are drafts, and not all of
    those are accepted, it means nothing afterwards."""

    row: int
    num_tokens: int
    state: int


class Encode(NamedTuple):
    """Insert `index` of a request is to be encoded until its rows are complete, or about budget_s
    after the step's first one began; what an earlier step has begun goes on. Equal digests are of
    one insert: those of several requests, and what is complete already."""

    request_id: RequestId
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    budget_s: float


class ScheduledBatch(NamedTuple):
    """One step's work, as differences to the executor's per-slot tables.

    To be applied in this order: assignments, table_updates, copies, then the rows. Row i runs the
    tokens [starts[i], starts[i] + num_tokens[i]) of the sequence in slots[i]. The executor reads
    their ids from its own token table: those of a prompt came with the assignment, and a sampled
    id is written there, at the position after its row, by the step that samples it. So the next
    step can be scheduled and launched before the host has learned the id.

    The first num_decodes rows are decodes: each runs the last known token, and samples. A later
    row, a prefill chunk, samples where samples[i] is true, which is where it ends
    its prompt and its answer may have a token.
    drafts: of each decode, ids that may come next, which its row runs after the last known token;
    empty where no decode has any. The row samples after each of its tokens for as long as what it
    has sampled is the draft that follows, so that its ids are those of rows of one token.
    wanted_drafts: of each row that samples, how many drafts the executor is to propose for the
    positions after its last new id, once it has sampled; empty where no row is to have any.
    num_unresolved: of each decode, how many drafts it has in steps before this one whose results
    the scheduler did not have; empty where no decode has any. Its row then starts as many tokens
    before starts[i] as of these drafts are not accepted, which the executor knows by its turn.
    Entries of block tables reach to where all are accepted.
    wants_forced: whether `SampledTokens.forced` would be used.
    num_scored: prompt tokens of this step whose successor's logprob is requested: rows of the
    output layer besides those that sample. snapshots: by row, of one row in the order of its
    tokens. A row that starts at 0 begins with a state of zeros, whatever its slot's state holds.
    encodes: in order, after the rows; a step with any may have no rows. dropped: digests of inserts
    whose rows, and what is begun of them, may go before this step. Rows read those of inserts that
    earlier steps have completed.
    """

    step: int
    assignments: tuple[SlotAssignment, ...]
    table_updates: tuple[TableUpdate, ...]
    copies: tuple[BlockCopy, ...]
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    samples: tuple[bool, ...]
    num_decodes: int
    num_scored: int = 0
    snapshots: tuple[StateSnapshot, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    wanted_drafts: tuple[int, ...] = ()
    num_unresolved: tuple[int, ...] = ()
    wants_forced: bool = False
    encodes: tuple[Encode, ...] = ()
    dropped: tuple[bytes, ...] = ()


class TokenLogprobs(NamedTuple):
    """Log probabilities, before temperature and filters, at one output position. logprob: the
    sampled token's. top: (token id, logprob) of the most likely, in falling order."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class PromptOutput(NamedTuple):
    """The outputs of a prompt. logprobs: of all its tokens but the first, or None.

    embedding: the pooled state of the last layer after its norm, through the model's pooled head if
    it has one, as little-endian float32, neither normalized nor cut; or None.
    """

    logprobs: PackedLogprobs | None
    embedding: bytes | None


class FurtherTokens(NamedTuple):
    """What a row sampled after its first id, which was the draft that followed, as was each of
    these but the last. logprobs: one for each, or None."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class SampledTokens(NamedTuple):
    """The results of a step: one id per sampling row, in the batch's row order.

    logprobs: None where no row wants them, else one entry per id, None for rows that do not.
    failed: of the sampling rows, those whose sequences cannot continue, and why; their ids are
    void. prompts: one for each row that ends a prompt with a prompt_request (see SlotAssignment),
    in row order, whether the row samples or not; None where NaN or infinities are in what it would
    be made of, and then the sequence ends. num_experts, adapter_bytes: as in `StepWork`.
    computed_s: where a step passes several stages, how long each of them computed it, on average.
    further: by sampling row, of those whose first draft was accepted. forced: by sampling row, ids
    that its grammar has next, where it leaves no choice of text: drafts for the next step.
    proposed: by sampling row, the drafts that were wanted of the executor, or fewer. proposing_s:
    what that took, after the step. num_caught_up: tokens known long before that it computed first,
    for what proposes. encoded: of the step's encodes, the inserts whose rows are complete, as
    request and index. encoding_s: the part of the step's time that its encodes took.
    """

    step: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    failed: Mapping[int, FinishReason] = {}
    prompts: tuple[PromptOutput | None, ...] = ()
    num_experts: int | None = None
    adapter_bytes: int = 0
    computed_s: float | None = None
    further: Mapping[int, FurtherTokens] = {}
    forced: Mapping[int, tuple[int, ...]] = {}
    proposed: Mapping[int, tuple[int, ...]] = {}
    proposing_s: float = 0.0
    num_caught_up: int = 0
    encoded: tuple[tuple[RequestId, int], ...] = ()
    encoding_s: float = 0.0


class Finish(NamedTuple):
    """How a sequence ended, and what it cost: part of the last output of each sequence.

    stop_token_id: the id that ended it, or None. first_scheduled_s: in the scheduler's clock, None
    where it never ran. num_recomputed_tokens: computed a second time because of preemptions.
    """

    reason: FinishReason
    stop_token_id: int | None
    first_scheduled_s: float | None
    num_preemptions: int
    num_recomputed_tokens: int


class Started(NamedTuple):
    """Answer `index` of a request is in its first step, scheduled at at_s in the scheduler's clock.

    num_cached_tokens: prompt tokens found in the prefix cache, or computed by answer 0 for it.
    predicted_ttft_s: of a request with a target for it, what was expected at its arrival.
    """

    request_id: RequestId
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    at_s: float
    num_cached_tokens: int
    predicted_ttft_s: float | None = None


class RequestOutput(NamedTuple):
    """New tokens of one sequence: answer `index` of the request. Exactly one per sequence is final.

    token_ids holds the stop token too, where there is one. logprobs, if requested, run parallel.
    num_cached_tokens: prompt tokens found in the prefix cache. prompt: in the first output of
    answer 0, where the request wants outputs of its prompt; returned once, and not at all where
    that answer is aborted before. With max_tokens 0 each answer has one output, without tokens,
    whose reason is LENGTH; answers 1.. never ran. predicted: drafts of its request's prediction
    that were accepted since its last output, and that were not; None where none was verified.
    """

    request_id: RequestId
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: Finish | None
    num_cached_tokens: int
    prompt: PromptOutput | None = None
    predicted: tuple[int, int] | None = None

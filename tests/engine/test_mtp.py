"""The head of a checkpoint proposes what it does as published, and answers with its drafts are
those without, to the last bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.config import (
    DraftMethod,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    Quantization,
    SpeculativeConfig,
)
from penstock.engine.drafting import mtp
from penstock.engine.drafting.mtp import MtpProposer
from penstock.engine.drafting.proposer import Proposals, ProposingRow
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Processor
from penstock.engine.loading.load import load
from penstock.engine.native.model import NativeModel
from penstock.engine.process.phases import Phases
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Request, SamplingParams
from tests.support.compiler import needs_compiler
from tests.support.drafting import EveryDraft
from tests.support.executors import cpu_executor
from tests.support.mtp_heads import ReferenceHead, add_head, rig, save_with_head
from tests.support.quantized_checkpoints import FORMATS, pack_layers, save_quantized
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import engine_config, make_model, save
from tests.support.ways import Answers, answers_of

pytestmark = needs_compiler

FAMILIES = ["qwen3_5", "qwen3_5_narrow", "qwen3_5_moe", "qwen3_5_wrapped"]
PROMPTS = [[5, 6, 7], [3, 9] * 20, list(range(3, 60))]
GREEDY: dict[str, Any] = {"temperature": 0.0, "num_logprobs": 2}
DRAWN: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "presence_penalty": 0.3,
    "num_logprobs": 1,
}
MOST = 3


def _requests(
    way: dict[str, Any], n: int = 1, max_tokens: Sequence[int] = (40, 40, 40)
) -> list[Request]:
    requests = []
    for i, (prompt, num) in enumerate(zip(PROMPTS, max_tokens, strict=True)):
        sampling = SamplingParams(max_tokens=num, seed=7, **way)
        requests.append(replace(make_request(str(i), prompt), sampling=sampling, n=n))
    return requests


def _config(path: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "block_size": 8,
        "max_model_len": 160,
        "scheduler": SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32),
        "speculative": SpeculativeConfig(method=DraftMethod.MTP, num_speculative_tokens=MOST),
    }
    return engine_config(path, **(settings | changes))


class Recorder:
    """What a proposer has proposed, after which ids, and the position from which on it attended."""

    def __init__(self, executor: CpuExecutor) -> None:
        proposer = executor._proposer
        assert isinstance(proposer, MtpProposer)
        self._proposer, self._propose = proposer, proposer.propose
        proposer.propose = self.propose  # type: ignore[method-assign]
        self.found: list[tuple[list[int], tuple[int, ...], int]] = []
        self.num_caught_up = 0

    def propose(self, rows: list[ProposingRow]) -> Proposals:
        known = {
            row.number: self._proposer._tokens[row.slot, : row.length].tolist() for row in rows
        }
        proposals = self._propose(rows)
        slots = {row.number: self._proposer._slots[row.slot] for row in rows}
        for number, drafts in proposals.drafts.items():
            first = slots[number].run * self._proposer._size
            self.found.append((known[number], drafts, first))
        self.num_caught_up += proposals.num_caught_up
        return proposals


def _engine(config: EngineConfig, **options: Any) -> tuple[SteppedEngine, EveryDraft, Recorder]:
    drafter = EveryDraft([], most=MOST, proposes=MtpProposer.name)
    engine = SteppedEngine(config, drafter=drafter, **options)
    assert engine.executor.info.proposes == "mtp"
    assert isinstance(engine.executor, CpuExecutor)
    return engine, drafter, Recorder(engine.executor)


def _plain(config: EngineConfig, requests: list[Request]) -> Answers:
    return answers_of(requests, SteppedEngine(config).run(requests))


@pytest.fixture(params=FAMILIES, scope="module")
def headed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ReferenceHead]:
    model = make_model(request.param, max_position_embeddings=256)
    head = ReferenceHead(model)
    return save_with_head(model, head, tmp_path_factory.mktemp("model")), head


def test_its_proposals_are_those_of_the_published_head(headed: tuple[Path, ReferenceHead]) -> None:
    path, head = headed
    requests = _requests(GREEDY)
    engine, _, recorder = _engine(_config(path))
    assert answers_of(requests, engine.run(requests)) == _plain(_config(path), requests)
    assert len(recorder.found) > 60
    assert {len(drafts) for _, drafts, _ in recorder.found} == {1, 2, MOST}
    for known, drafts, first in recorder.found:
        assert first == 0
        assert max(head.gaps(known, drafts)) < 1e-3


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        (GREEDY, {}),
        (DRAWN, {"dtype": Dtype.BFLOAT16, "num_threads": 2}),
        (GREEDY, {"kv_cache_dtype": KVCacheDtype.INT8}),
        (DRAWN, {"dtype": Dtype.BFLOAT16, "quantization": Quantization.INT8}),
        (GREEDY, {"dtype": Dtype.BFLOAT16, "quantization": Quantization.INT4}),
    ],
    ids=["float32-greedy", "bfloat16-drawn", "int8_kv-greedy", "int8-drawn", "int4-greedy"],
)
def test_its_drafts_change_no_answer(
    headed: tuple[Path, ReferenceHead], way: dict[str, Any], changes: dict[str, Any]
) -> None:
    path, _ = headed
    requests, config = _requests(way, n=2), _config(path, **changes)
    engine, drafter, _ = _engine(config)
    assert answers_of(requests, engine.run(requests)) == _plain(config, requests)
    assert drafter.stats[-1].num_draft_tokens_total > 100


@pytest.mark.parametrize(
    ("family", "way", "quantization"),
    [
        ("qwen3_5", GREEDY, None),
        ("qwen3_5", DRAWN, Quantization.INT8),
        ("qwen3_5_moe", DRAWN, None),
        ("qwen3_5_moe", GREEDY, Quantization.INT8),
    ],
)
def test_a_head_that_predicts_what_the_model_does_is_right(
    family: str, way: dict[str, Any], quantization: Quantization | None, tmp_path: Path
) -> None:
    model = make_model(family, max_position_embeddings=256)
    head = ReferenceHead(model)
    rig(model, head)
    config = _config(save_with_head(model, head, tmp_path), quantization=quantization)
    requests = _requests(way, n=2)
    engine, drafter, _ = _engine(config)
    assert answers_of(requests, engine.run(requests)) == _plain(config, requests)
    stats = drafter.stats[-1]
    assert stats.source == "mtp" and stats.num_draft_tokens_total > 100
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens_total


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_5", "fp8-block"), ("qwen3_5", "gptq4"), ("qwen3_5_moe", "fp8-block")],
)
def test_a_head_in_codes_proposes_what_their_values_do(
    family: str, name: str, tmp_path: Path
) -> None:
    """As published in FP8: all but gates, norms and what comes before the head's layer."""
    has_experts = family == "qwen3_5_moe"
    sizes = {"head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 256}
    if has_experts:
        sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    model = make_model(family, **sizes)
    head = ReferenceHead(model)
    plain = ("lm_head", "in_proj_a", "in_proj_b", "shared_expert_gate", "fc")
    codes = pack_layers(head, FORMATS[name].pack, plain, has_experts=has_experts)
    save_quantized(model, tmp_path, FORMATS[name], plain, has_experts=has_experts)
    add_head(tmp_path, head, codes)
    requests, config = _requests(GREEDY), _config(tmp_path)
    engine, drafter, recorder = _engine(config)
    assert answers_of(requests, engine.run(requests)) == _plain(config, requests)
    assert drafter.stats[-1].num_draft_tokens_total > 60
    for known, drafts, first in recorder.found:
        assert max(head.gaps(known, drafts, first)) < 1e-3


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceHead]:
    model = make_model("qwen3_5", max_position_embeddings=256)
    head = ReferenceHead(model)
    return save_with_head(model, head, tmp_path_factory.mktemp("dense")), head


def test_after_preemptions_it_attends_from_where_its_keys_are(
    dense: tuple[Path, ReferenceHead],
) -> None:
    path, head = dense
    requests, config = _requests(GREEDY, n=2), _config(path)
    engine, _, recorder = _engine(config, num_blocks=22)
    assert answers_of(requests, engine.run(requests)) == _plain(config, requests)
    assert engine.scheduler.stats().preemptions_total
    for known, drafts, first in recorder.found:
        assert max(head.gaps(known, drafts, first)) < 1e-3


def test_a_prefix_that_is_found_has_its_keys_too(dense: tuple[Path, ReferenceHead]) -> None:
    path, head = dense
    config = _config(path)
    [request] = _requests(GREEDY, max_tokens=(1, 1, 44))[2:]
    engine, _, recorder = _engine(config)
    [answer] = engine.run([request])
    ids = [token_id for output in answer for token_id in output.token_ids]
    again = replace(request, prompt_token_ids=(*request.prompt_token_ids, *ids, 7, 8, 9))
    before = len(recorder.found)
    outputs = engine.run([again])
    assert answers_of([again], outputs) == _plain(config, [again])
    assert outputs[0][0].num_cached_tokens > 80
    for known, drafts, first in recorder.found[before:]:
        assert first == 0  # of the first turn, too
        # The last key of what was found is of the token that followed there.
        assert max(head.gaps(known, drafts)) < 0.5
    # Where the blocks were given to others meanwhile, it begins with what is new.
    for start in range(10, 16):
        engine.run([replace(request, prompt_token_ids=tuple(range(start, start + 70)))])
    assert answers_of([again], engine.run([again])) == _plain(config, [again])


def test_of_long_prompts_it_reads_the_newest_tokens(
    dense: tuple[Path, ReferenceHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, head = dense
    monkeypatch.setattr(mtp, "MOST_KEPT", 20)
    monkeypatch.setattr(mtp, "_CATCH_UP_TOKENS", 7)
    requests, config = _requests(GREEDY), _config(path)
    engine, _, recorder = _engine(config)
    assert answers_of(requests, engine.run(requests)) == _plain(config, requests)
    assert {first for *_, first in recorder.found} >= {0, 40}
    for known, drafts, first in recorder.found:
        assert max(head.gaps(known, drafts, first)) < 1e-3


def test_where_nobody_wants_drafts_the_head_computes_nothing(
    dense: tuple[Path, ReferenceHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = dense
    requests, config = _requests(GREEDY), _config(path)
    computed: list[NativeModel] = []
    engine = SteppedEngine(config)
    assert isinstance(engine.executor, CpuExecutor)
    proposer = engine.executor._proposer
    assert isinstance(proposer, MtpProposer)
    monkeypatch.setattr(proposer, "_computed", lambda *_: computed.append(proposer._head))
    engine.run(requests)
    assert not computed


def test_more_sequences_than_it_keeps_states_of_answer_the_same(
    dense: tuple[Path, ReferenceHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, head = dense
    monkeypatch.setattr(mtp, "MOST_ROWS", 2)
    requests, config = _requests(GREEDY, n=2, max_tokens=(40, 20, 60)), _config(path)
    engine, _, recorder = _engine(config)
    assert answers_of(requests, engine.run(requests)) == _plain(config, requests)
    for known, drafts, first in recorder.found:
        assert max(head.gaps(known, drafts, first)) < 1e-3


def test_the_ledger_has_the_head_and_its_blocks(dense: tuple[Path, ReferenceHead]) -> None:
    path, head = dense
    config = _config(path, kv_cache_memory_bytes=1_200_000)
    loaded = load(config, path, None, Processor(), Phases())
    info = loaded.info
    without = cpu_executor(
        replace(config, speculative=SpeculativeConfig(method=DraftMethod.NGRAM)), path
    ).info
    # Blocks of both are paid for by the same budget.
    assert info.num_blocks < without.num_blocks and without.proposes is None
    weights = sum(tensor.nbytes for tensor in head.state_dict().values())
    kept = mtp.MOST_ROWS * mtp.MOST_KEPT * 64 * 4
    num_blocks = info.num_blocks + mtp.num_spare_blocks(MOST, 8)
    assert loaded.ledger.draft_model == weights + kept + num_blocks * 8 * 2 * (2 * 32 * 4)
    assert cpu_executor(replace(config, speculative=None), path).info.proposes == "mtp"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "has no such head"),
        ("layers", "several layers"),
        ("embedding", "an embedding of its own"),
        ("quantized", "is quantized in the checkpoint"),
        ("dummy", "made up"),
    ],
)
def test_without_a_head_that_it_can_compute_the_method_is_refused_by_name(
    change: str, message: str, tmp_path: Path
) -> None:
    model = make_model("qwen3_5", max_position_embeddings=256)
    if change in ("none", "dummy"):
        save(model, tmp_path)
    else:
        save_with_head(model, ReferenceHead(model), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    weight = tensors.get("mtp.layers.0.mlp.up_proj.weight", torch.zeros(1))
    if change == "layers":
        tensors["mtp.layers.1.mlp.up_proj.weight"] = weight.clone()
    elif change == "embedding":
        tensors["mtp.embed_tokens.weight"] = weight.clone()
    elif change == "quantized":
        tensors["mtp.layers.0.mlp.up_proj.weight"] = weight.to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    load_format = LoadFormat.DUMMY if change == "dummy" else LoadFormat.AUTO
    config = _config(tmp_path, load_format=load_format)
    with pytest.raises(InvalidConfig, match=f"--speculative-config: .*{message}"):
        cpu_executor(config, tmp_path)
    # Without the flag, such a checkpoint is served without drafts of a head.
    info = cpu_executor(replace(config, speculative=None), tmp_path).info
    assert info.proposes is None and info.takes_drafts

"""Several ranks give the answers of one. `tests/distributed` has all families."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from penstock.engine.config import Dtype, KVCacheDtype, Quantization
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import RequestId, RequestOutput
from tests.support.compiler import needs_compiler
from tests.support.executors import cpu_executor
from tests.support.gguf_files import WRITTEN, quantized, write_gguf
from tests.support.parallel_answers import (
    TOLERANCE,
    assert_ranks_answer_alike,
    parallel_config,
)
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.rank_threads import RankThreads, memberships
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import make_model, save

pytestmark = needs_compiler


def saved(family: str, path: Path, **options: Any) -> Path:
    return save(make_model(family, max_position_embeddings=512, **options), path)


@pytest.mark.parametrize("family", ["llama_biases", "olmo3", "gpt_oss"])
def test_two_ranks_answer_as_one_and_have_equal_bits(family: str, tmp_path: Path) -> None:
    config = parallel_config(saved(family, tmp_path))
    ranks = assert_ranks_answer_alike(config, 2, num_tokens=40)
    info = ranks.info
    assert info.tensor_parallel_size == 2
    assert not (info.computed_by or "torch").startswith("torch")


def test_so_do_ranks_that_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    ranks = assert_ranks_answer_alike(parallel_config(saved("olmo2", tmp_path)), 2, num_tokens=40)
    assert (ranks.info.computed_by or "").startswith("torch")


def test_so_do_four_that_share_key_heads_and_a_vocabulary_that_they_cannot_divide(
    tmp_path: Path,
) -> None:
    config = parallel_config(saved("qwen2", tmp_path, vocab_size=97))
    assert_ranks_answer_alike(config, 4, num_tokens=40)


def test_threads_of_a_rank_sum_at_the_same_time(tmp_path: Path) -> None:
    path = saved("llama2", tmp_path, hidden_size=1024, num_hidden_layers=1)
    scheduler = replace(parallel_config(path).scheduler, max_num_batched_tokens=128)
    config = parallel_config(path, num_threads=2, scheduler=scheduler)
    assert_ranks_answer_alike(config, 2, num_tokens=10, tolerance=1e-3)


def test_a_rank_reads_half_of_the_bytes(tmp_path: Path) -> None:
    config = parallel_config(saved("llama2", tmp_path))
    whole = cpu_executor(config, tmp_path).info
    part = assert_ranks_answer_alike(config, 2, num_tokens=4).info
    assert part.num_parameters == whole.num_parameters and part.vocab_size == whole.vocab_size
    assert 0.5 < part.weight_bytes / whole.weight_bytes < 0.55
    assert part.attention[0].kv_bytes_per_token * 2 == whole.attention[0].kv_bytes_per_token
    assert part.flops_per_token * 2 == whole.flops_per_token


@pytest.mark.parametrize("name", ["fp8-block", "awq"])
def test_ranks_and_stages_of_a_quantized_model_answer_as_one(name: str, tmp_path: Path) -> None:
    model = make_model("llama2", max_position_embeddings=512, head_dim=32, intermediate_size=128)
    save_quantized(model, tmp_path, FORMATS[name])
    config = parallel_config(tmp_path)
    whole = cpu_executor(config, tmp_path).info
    # A processor rounds what it multiplies with integers.
    tolerance = TOLERANCE if name.startswith("fp8") else 0.05
    part = assert_ranks_answer_alike(config, 2, num_tokens=20, tolerance=tolerance).info
    assert 0.5 < part.weight_bytes / whole.weight_bytes < 0.55
    assert_ranks_answer_alike(config, 2, 2, num_tokens=20, tolerance=tolerance)


def test_stages_of_a_gguf_file_answer_as_one(tmp_path: Path) -> None:
    model = make_model("qwen2", max_position_embeddings=512)
    path = write_gguf(tmp_path / "model.gguf", model, quantized(GGMLQuantizationType.Q8_0))
    assert_ranks_answer_alike(parallel_config(path), 1, 2, num_tokens=20)


_LATENTS = {
    **WRITTEN["deepseek_v3"],
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 64),
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("llama_biases", GGMLQuantizationType.Q4_K, {"hidden_size": 256, "intermediate_size": 768}),
        ("qwen3_5_moe", GGMLQuantizationType.Q4_0, {"moe_intermediate_size": 64}),
        ("deepseek_v3", GGMLQuantizationType.Q8_0, _LATENTS),
    ],
)
def test_ranks_of_a_gguf_file_answer_as_one(
    family: str, kind: GGMLQuantizationType, options: dict[str, Any], tmp_path: Path
) -> None:
    """The first have one and a half blocks of 256 columns each; of the second, heads that the file
    has in another order; of the third, heads whose keys and values of latents are apart."""
    model = make_model(family, max_position_embeddings=512, vocab_size=97, **options)
    path = write_gguf(tmp_path / "model.gguf", model, quantized(kind))
    config = parallel_config(path)
    whole = cpu_executor(config, path).info
    part = assert_ranks_answer_alike(config, 2, num_tokens=20, tolerance=0.05).info
    assert 0.45 < part.weight_bytes / whole.weight_bytes < 0.7


def test_ranks_round_their_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.loading.cpu.load_library", lambda *_, **__: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = saved("qwen2", tmp_path, vocab_size=97, intermediate_size=128)
    config = parallel_config(path, quantization=Quantization.INT8)
    ranks = assert_ranks_answer_alike(config, 2, 2, num_tokens=20)
    assert len(list((tmp_path / "cache" / "penstock" / "quantized").iterdir())) == 4 + 1
    assert ranks.info.quantization is not None


def test_the_id_of_an_aborted_sequence_is_not_written_to_the_prompt_that_has_its_slot(
    tmp_path: Path,
) -> None:
    """The first stage learns it after the slot has its next sequence, of which it has computed
    fewer tokens than the aborted one had."""
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=24)
    config = parallel_config(saved("llama2", tmp_path), scheduler=scheduler)
    # A salt, so that no cached block spares it the first chunk.
    asked = make_request("long", 60, max_tokens=8, cache_salt="another")
    (expected,) = SteppedEngine(config).run([asked])
    of_stages = replace(config, pipeline_parallel_size=2)
    ranks = RankThreads(of_stages, memberships(of_stages))
    steps = SteppedEngine(of_stages, ranks).scheduler
    launched: deque[PendingTokens] = deque()
    outputs: list[RequestOutput] = []

    def step() -> None:
        if batch := steps.schedule(0.0):
            launched.append(ranks.execute(batch))
        if not batch or len(launched) == 2:
            outputs.extend(steps.update(launched.popleft().wait()))

    try:
        steps.add(make_request("aborted", 30, max_tokens=8))
        while not outputs:
            step()
        if not launched:
            launched.append(ranks.execute(steps.schedule(0.0)))  # type: ignore[arg-type]
        steps.abort(RequestId("aborted"))
        steps.add(asked)
        outputs.clear()
        while steps.has_work or launched:
            step()
    finally:
        ranks.close()
    assert ids_of(outputs) == ids_of(expected)


@pytest.mark.slow  # they compile three more libraries
@pytest.mark.parametrize(
    "changes",
    [{"dtype": Dtype.BFLOAT16}, {"dtype": Dtype.FLOAT16}, {"kv_cache_dtype": KVCacheDtype.INT8}],
)
def test_ranks_agree_in_every_type(changes: dict[str, object], tmp_path: Path) -> None:
    config = parallel_config(saved("qwen3", tmp_path), **changes)
    assert_ranks_answer_alike(config, 2, num_tokens=10, tolerance=0.2)

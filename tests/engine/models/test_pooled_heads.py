"""Classifiers, dense layers after pooling and rerankers give what transformers' classes give."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.config import LoadFormat
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.executors.cuda.device import Interpreter
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import Pooling, PromptOutputRequest, SlotAssignment
from tests.support.compiler import HAS_COMPILER
from tests.support.encoder_models import save_encoder, states_of
from tests.support.executors import cpu_executor, cuda_executor
from tests.support.kernels import ON_GPU
from tests.support.pooled_models import (
    DECODERS,
    ENCODERS,
    LABELS,
    logits_of,
    make_classifier,
    mean_of,
    pooled_by,
    save_dense,
    save_embedding_gemma,
    save_modules,
    save_reranker,
    score_of,
)
from tests.support.stepping import SteppedEngine
from tests.support.tiny_models import (
    BLOCK_SIZE,
    GREEDY,
    SMALLEST,
    engine_config,
    make_batch,
    make_model,
    save,
)

TEXTS = [[3 + 7 * i % 90 for i in range(length)] for length in (20, 7, 33)]
WAYS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not HAS_COMPILER, reason="no compiler")),
]
assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=0)


def executor_of(path: Path, way: str = "torch", **changes: Any) -> CpuExecutor:
    """way: as of WAYS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.loading.cpu.measure_rates", lambda *given, **more: {})
        if way == "torch":
            patch.setattr("penstock.engine.loading.cpu._library_for", lambda *given: None)
        executor = cpu_executor(engine_config(path, **changes), path)
    assert (executor._native is None) is (way == "torch")
    return executor


def pooled(
    executor: CpuExecutor,
    texts: list[list[int]],
    pooling: Pooling,
    nums_first: list[int] | None = None,
) -> list[Tensor]:
    """What comes of texts that are computed in one step."""
    nums_first = nums_first or [0] * len(texts)
    assignments, block = [], 0
    for slot, (ids, num_first) in enumerate(zip(texts, nums_first, strict=True)):
        num_blocks = -(-len(ids) // BLOCK_SIZE)
        tables = (tuple(range(block, block + num_blocks)),) * len(executor.pool.all_groups)
        assignment = SlotAssignment(slot, tuple(ids), len(ids), tables, GREEDY, seed=0)
        wanted = PromptOutputRequest(None, pooling)
        assignments.append(assignment._replace(prompt_request=wanted, num_first=num_first))
        block += num_blocks
    num, lengths = len(texts), tuple(map(len, texts))
    batch = make_batch(
        tuple(range(num)),
        (0,) * num,
        lengths,
        samples=(False,) * num,
        assignments=tuple(assignments),
    )
    outputs = executor.execute(batch).wait().prompts
    embeddings = [each.embedding for each in outputs if each is not None]
    assert len(embeddings) == num
    return [torch.frombuffer(bytearray(each or b""), dtype=torch.float32) for each in embeddings]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_logits_are_those_of_transformers(name: str, way: str, tmp_path: Path) -> None:
    model = make_classifier(name)
    executor = executor_of(save(model, tmp_path), way)
    info = executor.info
    assert info.labels == tuple(LABELS.values())
    assert info.pooled_size == len(LABELS)
    assert not info.generates
    assert info.computes_whole is (name in ENCODERS)
    pooling = Pooling.MEAN if name == "modernbert_mean" else Pooling.FIRST
    assert info.pooling is (pooling if name in ENCODERS else Pooling.LAST)
    found = pooled(executor, TEXTS, info.pooling)
    for ids, logits in zip(TEXTS, found, strict=True):
        assert_close(logits, logits_of(model, ids))
    assert not torch.allclose(found[0], found[1], atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bert", "nomic_bert"])
def test_a_second_text_has_the_type_of_its_own(name: str, way: str, tmp_path: Path) -> None:
    model = make_classifier(name)
    executor = executor_of(save(model, tmp_path), way)
    nums = [8, 0, 32]
    found = pooled(executor, TEXTS, Pooling.FIRST, nums)
    for ids, num_first, logits in zip(TEXTS, nums, found, strict=True):
        assert_close(logits, logits_of(model, ids, num_first))
    [without] = pooled(executor, TEXTS[:1], Pooling.FIRST)
    assert not torch.allclose(without, found[0], atol=1e-3)


def test_types_are_without_effect_where_a_model_has_one(tmp_path: Path) -> None:
    executor = executor_of(save(make_classifier("roberta"), tmp_path))
    [with_types] = pooled(executor, TEXTS[:1], Pooling.FIRST, [8])
    [without] = pooled(executor, TEXTS[:1], Pooling.FIRST)
    assert torch.equal(with_types, without)


def test_a_text_has_the_same_bits_beside_others(tmp_path: Path) -> None:
    executor = executor_of(
        save(make_classifier("bert"), tmp_path), "native" if HAS_COMPILER else "torch"
    )
    together = pooled(executor, TEXTS, Pooling.FIRST)
    alone = [pooled(executor, [ids], Pooling.FIRST)[0] for ids in TEXTS]
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", [nn.Identity(), nn.Tanh()])
def test_dense_modules_follow_the_mean(activation: nn.Module, way: str, tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path)
    layers = save_dense(tmp_path, [48, 80, 24], activation)
    executor = executor_of(tmp_path, way)
    assert (executor.info.pooled_size, executor.info.labels) == (24, ())
    for ids, embedding in zip(TEXTS, pooled(executor, TEXTS, Pooling.MEAN), strict=True):
        assert_close(embedding, mean_of(model, layers, ids))


@pytest.mark.parametrize("way", WAYS)
def test_embedding_gemma_attends_to_both_sides(way: str, tmp_path: Path) -> None:
    """Its window of 9 counts positions of both sides: four before a token, and four after it."""
    model, layers = save_embedding_gemma(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    assert set(config.windows) == {None, 5}
    executor = executor_of(tmp_path, way)
    assert executor.info.computes_whole
    for ids, embedding in zip(TEXTS, pooled(executor, TEXTS, Pooling.MEAN), strict=True):
        assert_close(embedding, mean_of(model, layers, ids))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("found_by", ["name", "keys", "module"])
def test_a_reranker_scores_by_two_tokens(found_by: str, is_tied: bool, tmp_path: Path) -> None:
    model, path = save_reranker(tmp_path, found_by, tie_word_embeddings=is_tied)
    executor = executor_of(path)
    assert executor.info.pooled_size == 1
    assert executor.info.pooling is Pooling.LAST
    assert len(executor.info.labels) == 1
    assert not executor.info.generates
    for ids, score in zip(TEXTS, pooled(executor, TEXTS, Pooling.LAST), strict=True):
        assert_close(score, score_of(model, ids))


def test_a_score_may_be_one_token_s_logit(tmp_path: Path) -> None:
    model = make_model("qwen3")
    save(model, tmp_path)
    save_modules(tmp_path, ("LogitScore", {"true_token_id": 41, "false_token_id": None}))
    [score] = pooled(executor_of(tmp_path), TEXTS[:1], Pooling.LAST)
    with torch.no_grad():
        logits = model(torch.tensor(TEXTS[0])[None]).logits[0, -1]
    assert_close(score, logits[41][None])


def test_another_qwen3_of_any_name_generates(tmp_path: Path) -> None:
    path = save(make_model("qwen3"), tmp_path / "qwen3")
    assert ModelConfig.from_dir(path).generates


def test_a_decoder_without_an_output_layer_gives_states(tmp_path: Path) -> None:
    model = make_model("llama2").model
    save(model, tmp_path)
    executor = executor_of(tmp_path)
    assert not executor.info.generates
    assert not executor.info.computes_whole
    [state] = pooled(executor, TEXTS[:1], Pooling.LAST)
    assert_close(state, states_of(model, torch.tensor(TEXTS[0]))[-1])


def as_alibaba(path: Path, factor: float) -> None:
    """Renames a checkpoint of transformers' GTE to what its makers' code calls it."""
    config = json.loads((path / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {
        "architectures": ["NewForSequenceClassification"],
        "model_type": "new",
        "auto_map": {
            "AutoModelForSequenceClassification": "x--modeling.NewForSequenceClassification"
        },
        "rope_theta": theta,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "logn_attention_clip1": False,
        "pack_qkv": True,
        "unpad_inputs": False,
        "use_memory_efficient_attention": True,
    }
    (path / "config.json").write_text(json.dumps(config))


def test_a_checkpoint_of_gte_s_own_code(tmp_path: Path) -> None:
    """Its frequencies are those of a base that is factor times as high, divided by factor to the
    power of 2 / head_dim."""
    model = make_classifier("gte")
    save(model, tmp_path)
    factor, head_dim = 8.0, 12
    as_alibaba(tmp_path, factor)
    rotary = model.gte.rotary_emb
    theta = model.config.rope_parameters["rope_theta"] * factor
    powers = torch.arange(0, head_dim, 2).float() / head_dim
    rotary.inv_freq.copy_(theta**-powers / factor ** (2 / head_dim))
    executor = executor_of(tmp_path)
    for ids, logits in zip(TEXTS, pooled(executor, TEXTS, Pooling.FIRST), strict=True):
        assert_close(logits, logits_of(model, ids))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "'id2label' must be an object with 0 to 1"),
        ({"problem_type": "guessing"}, "'problem_type' must be regression or"),
        ({"id2label": {"0": "a"}}, "does not fit the (1, 48)"),
        ({"num_labels": 5, "id2label": None}, "does not fit the (5, 48)"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    save(make_classifier("bert"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel) as error:
        executor_of(tmp_path)
    assert expected in str(error.value)


def test_labels_that_config_json_leaves_out_are_two(tmp_path: Path) -> None:
    save(make_classifier("bert"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = ModelConfig.from_dir(tmp_path).pooled
    assert head is not None
    assert head.labels == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"in_features": 40}, "'in_features' must be 48, as many as it is given"),
        ({"activation_function": "torch.nn.Mish"}, "'activation_function' must be identity or"),
        ({"module_input_name": "token_embeddings"}, "'module_input_name' must be"),
    ],
)
def test_a_dense_module_that_is_not_computed_is_refused(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    save_encoder("bert", tmp_path)
    save_dense(tmp_path, [48, 24], nn.Tanh())
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InvalidModel) as error:
        ModelConfig.from_dir(tmp_path)
    assert expected in str(error.value)


def test_a_head_may_be_made_up(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    save_dense(tmp_path, [48, 24], nn.Tanh())
    [embedding] = pooled(
        executor_of(tmp_path, load_format=LoadFormat.DUMMY), TEXTS[:1], Pooling.MEAN
    )
    assert embedding.shape == (24,)
    assert embedding.isfinite().all()


def test_a_decoder_s_prompt_may_be_divided_and_its_beginning_cached(tmp_path: Path) -> None:
    model = make_classifier("qwen3")
    save(model, tmp_path)
    few = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    config = engine_config(tmp_path, scheduler=few)
    engine = SteppedEngine(config, executor_of(tmp_path, scheduler=few))
    texts = [*TEXTS, [*TEXTS[2][:17], 5]]
    expected = [logits_of(model, ids) for ids in texts]
    for _ in range(2):
        for logits, wanted in zip(pooled_by(engine, texts, Pooling.LAST), expected, strict=True):
            assert_close(logits, wanted)
    assert engine.scheduler.stats().prefix_hit_tokens_total


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here, not interpreted")
def test_a_decoder_s_head_on_a_gpu(tmp_path: Path) -> None:
    model = make_classifier("qwen3", **SMALLEST)
    save(model, tmp_path)
    few = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    changes: dict[str, Any] = {"block_size": 16, "kv_cache_memory_bytes": 2**20}
    config = engine_config(tmp_path, scheduler=few, **changes)
    executor = cuda_executor(config, tmp_path, Interpreter())
    assert executor.info.labels == tuple(LABELS.values())
    texts = [TEXTS[1], TEXTS[0]]
    found = pooled_by(SteppedEngine(config, executor), texts, Pooling.LAST)
    for ids, logits in zip(texts, found, strict=True):
        assert_close(logits, logits_of(model, ids))


def test_an_encoder_s_head_is_refused_on_a_gpu(tmp_path: Path) -> None:
    save(make_classifier("bert"), tmp_path)
    with pytest.raises(InvalidConfig, match="bert is an encoder of text, which one process of a"):
        cuda_executor(engine_config(tmp_path), tmp_path, Interpreter())


def test_config_json_of_embedding_gemma(tmp_path: Path) -> None:
    """Its own, but for the number of layers and of ids."""
    config = {
        "_sliding_window_pattern": 6,
        "architectures": ["Gemma3TextModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "dtype": "float32",
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 1152,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 2048,
        "model_type": "gemma3_text",
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "transformers_version": "4.57.0.dev0",
        "use_bidirectional_attention": True,
        "use_cache": True,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_dense(tmp_path, [768, 3072, 768], nn.Identity())
    read = ModelConfig.from_dir(tmp_path)
    assert (read.windows, read.is_encoder) == ((257, None), True)
    assert read.pooled is not None
    assert [layer.shape for layer in read.pooled.layers] == [(3072, 768), (768, 3072)]


def test_config_json_of_a_cross_encoder(tmp_path: Path) -> None:
    """Of ms-marco-MiniLM-L6-v2, but for the number of ids."""
    config = {
        "architectures": ["BertForSequenceClassification"],
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": None,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 384,
        "id2label": {"0": "LABEL_0"},
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "label2id": {"LABEL_0": 0},
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": 12,
        "num_hidden_layers": 6,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        "transformers_version": "4.51.0",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = ModelConfig.from_dir(tmp_path).pooled
    assert head is not None
    assert [layer.shape for layer in head.layers] == [(384, 384), (1, 384)]
    assert (head.labels, head.problem_type) == (("LABEL_0",), None)

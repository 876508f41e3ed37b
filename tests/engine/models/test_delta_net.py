"""Gated delta nets: as transformers computes them, with the same bits however a sequence is divided
into steps, and snapshots from which it goes on."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.memory.host import Arena
from penstock.engine.memory.pool.kv_layout import divide, longest_that_fits
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.models.at_load.quantize import Rounder, quantization_plan
from penstock.engine.models.at_load.weights import QuantizedWeights
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.delta_net.layer import (
    DeltaNetLayer,
    Segment,
    torch_recurrence,
)
from penstock.engine.models.weights import Checkpoint
from penstock.engine.native.model import NativeModel
from penstock.engine.process.phases import Phases
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestId, SamplingParams, StateSnapshot
from tests.support.compiler import needs_compiler
from tests.support.delta_nets import delta_net_layer
from tests.support.executors import cpu_executor
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import (
    HYBRID_FAMILIES,
    Harness,
    engine_config,
    make_model,
    save,
)

PROMPT_LEN = 70
TOLERANCE = 1e-4
CHUNKS = (1, 7, 64)


@pytest.fixture(params=[False, pytest.param(True, marks=needs_compiler)], ids=["torch", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    """Whether the compiled step computes the model."""
    return bool(request.param)


@pytest.fixture(params=HYBRID_FAMILIES, scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(a directory with the model, transformers' logits of two prompts, the prompts)"""
    model = make_model(request.param)
    path = save(model, tmp_path_factory.mktemp("model"))
    prompts = torch.randint(3, 96, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return path, model(prompts).logits, prompts


def harness(path: Path, prompts: Tensor, native: bool, **options: Any) -> Harness:
    made = Harness(path, native=native, **options)
    made.token_table[: len(prompts), :PROMPT_LEN] = prompts
    return made


def test_in_chunks_and_in_company_the_logits_are_those_of_transformers(
    family: Any, native: bool
) -> None:
    path, expected, prompts = family
    made = harness(path, prompts, native)
    found = [made.run([(0, start, 7)])[0] for start in range(0, 35, 7)]
    for position in range(35, PROMPT_LEN):
        rows = (0, position, 1), (1, position - 35, 1)
        found.append(made.run(rows, num_decodes=2 if position > 35 else 0)[0])
    torch.testing.assert_close(torch.cat(found), expected[0], atol=TOLERANCE, rtol=0)
    both = harness(path, prompts, native).run([(0, 0, PROMPT_LEN), (1, 0, 20)])
    torch.testing.assert_close(both[0], expected[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(both[1], expected[1, :20], atol=TOLERANCE, rtol=0)


def test_a_sequence_goes_on_from_a_snapshot_that_another_step_took(
    family: Any, native: bool
) -> None:
    path, expected, prompts = family
    made = harness(path, prompts, native)
    in_middle, at_end = StateSnapshot(1, 12, 4), StateSnapshot(1, 40, 5)
    made.run(((1, 0, 30), (0, 0, 40)), snapshots=(in_middle, at_end))
    made.block_tables[0, 2] = made.block_tables[0, 0]
    made.token_table[2] = made.token_table[0]
    for state, length in ((4, 12), (5, 40)):
        assert isinstance(made.pool, KVPools)
        made.pool.all_groups[1].copy([(state, 2)])
        (found,) = made.run([(2, length, PROMPT_LEN - length)])
        torch.testing.assert_close(found, expected[0, length:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_of_which_every_layer_has_attention_has_no_states(
    native: bool, name: str, tmp_path: Path
) -> None:
    model = make_model(name, layer_types=["full_attention"] * 4)
    path = save(model, tmp_path)
    assert not any(ModelConfig.from_dir(path).recurrent)
    prompt = torch.randint(3, 96, (1, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(prompt).logits[0]
    made = Harness(path, native=native)
    made.token_table[:2, :PROMPT_LEN] = prompt
    (found,) = made.run([(0, 0, PROMPT_LEN)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    for position in range(9):
        (one,) = made.run([(1, position, 1)], num_decodes=min(position, 1))
        torch.testing.assert_close(one[0], expected[position], atol=TOLERANCE, rtol=0)
    config = engine_config(path, quantization=Quantization.INT8)
    assert cpu_executor(config, path).info.num_states == 0


CONFIG = DeltaNet(
    hidden_size=64, num_key_heads=2, num_value_heads=6, key_dim=24, value_dim=80, num_taps=4
)


@pytest.fixture
def layer() -> Iterator[tuple[DeltaNetLayer, Tensor, Tensor]]:
    """A layer, and the projections of 128 tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        heads = CONFIG.num_value_heads
        made = delta_net_layer(
            CONFIG,
            taps=torch.randn(4, CONFIG.num_channels),
            decay=-torch.rand(heads) * 4,
            bias=torch.randn(heads),
            norm=torch.randn(80),
        )
        yield made, torch.randn(128, CONFIG.num_channels + CONFIG.num_values), torch.randn(128, 12)


def run_in_chunks(
    layer: tuple[DeltaNetLayer, Tensor, Tensor], size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the matrices and inputs of the state."""
    net, projected, gates = layer
    shape = CONFIG.state_shape(1)
    matrices = torch.full((2, shape.num_heads, shape.key_dim, shape.value_dim), torch.nan)
    inputs = torch.full((2, shape.num_inputs, shape.num_channels), torch.nan)
    outputs = []
    for first in range(0, len(projected), size):
        part = slice(first, first + size)
        end = len(projected[part])
        segments = [[Segment(0, end, 1 if first else -1, 1)]]
        given = (projected[part], gates[part], matrices, inputs, segments)
        outputs.append(torch_recurrence(net, *given))
    return torch.cat(outputs), matrices[1], inputs[1]


def test_in_torch_a_state_has_the_same_bits_after_chunks_of_1_and_7_and_64(
    layer: tuple[DeltaNetLayer, Tensor, Tensor],
) -> None:
    first, *others = (run_in_chunks(layer, size) for size in CHUNKS)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# Of which no width is of whole vectors of 16 numbers.
_ODD = {"linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 84}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3_5_moe", **_ODD), tmp_path_factory.mktemp("odd"))


def states(made: Harness, slot: int) -> tuple[Tensor, Tensor]:
    """The matrices and the inputs of a sequence, of all layers."""
    assert isinstance(made.pool, KVPools) and made.pool.recurrent is not None
    return made.pool.recurrent.matrices[:, slot], made.pool.recurrent.inputs[:, slot]


def bits(made: Harness, slot: int, size: int, *others: tuple[int, int, int]) -> list[Tensor]:
    """A sequence's logits, and its state after a prompt in chunks of this size; others: rows of
    each step that come before it."""
    logits = []
    for start in range(0, PROMPT_LEN, size):
        row = (slot, start, min(size, PROMPT_LEN - start))
        logits.append(made.run([*others, row])[-1])
    return [torch.cat(logits), *states(made, slot)]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_in_chunks_in_company_and_with_other_threads(
    dtype: torch.dtype, odd: Path
) -> None:
    prompts = torch.randint(3, 96, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    prompts = prompts[[0, 1, 0]]
    alone = bits(harness(odd, prompts, native=True, dtype=dtype), 0, PROMPT_LEN)
    for size in CHUNKS:
        made = harness(odd, prompts, native=True, dtype=dtype, threads=3)
        for found in (bits(made, 0, size), bits(made, 2, size, (1, 0, 23), (3, 0, 1))):
            assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_after_drafts_a_state_has_the_bits_of_those_that_were_accepted_alone(
    dtype: torch.dtype, threads: int, odd: Path
) -> None:
    prompts = torch.randint(3, 96, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    plain, drafted = (
        harness(odd, prompts, native=True, dtype=dtype, threads=threads) for _ in range(2)
    )
    random, lengths, tables = Random(4), [9, 20], drafted.token_table.clone()
    for made in (plain, drafted):
        made.run([(0, 0, 9), (1, 0, 20)])
    while max(lengths) < PROMPT_LEN - 7:
        nums = random.randint(0, 6), random.randint(0, 6)
        accepted = [random.randint(0, num) for num in nums]
        drafted.token_table[:] = tables
        for slot in (0, 1):
            drafted.token_table[slot, lengths[slot] + 1 + accepted[slot] :] = 5
        found = drafted.run(
            [(slot, lengths[slot], 1 + nums[slot]) for slot in (0, 1)],
            num_drafts=nums,
            snapshots=(
                StateSnapshot(0, 1, 4),
                *([StateSnapshot(0, 1 + accepted[0], 5)] if accepted[0] else []),
                *([StateSnapshot(1, 1 + nums[1], 6)] if accepted[1] < nums[1] else []),
            ),
        )
        before = [each.clone() for each in states(drafted, 6)]
        assert isinstance(drafted.model, NativeModel)
        drafted.model.accept(accepted)
        for slot in (0, 1):
            for number in range(1 + accepted[slot]):
                [expected] = plain.run([(slot, lengths[slot] + number, 1)], num_decodes=1)
                assert torch.equal(found[slot][number], expected[0])
                if slot == number == 0:
                    assert _are_equal(states(drafted, 4), states(plain, 0))
            lengths[slot] += 1 + accepted[slot]
            assert _are_equal(states(drafted, slot), states(plain, slot))
        if accepted[0]:
            assert _are_equal(states(drafted, 5), states(plain, 0))
        assert _are_equal(states(drafted, 6), before)


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@needs_compiler
def test_the_compiled_recurrence_is_that_of_torch(odd: Path) -> None:
    prompt = torch.randint(3, 96, (1, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
    mine, expected = (bits(harness(odd, prompt, native), 0, 64) for native in (True, False))
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_answers_of_200_tokens_are_greedy_with_chunks_preemption_hits_and_samples(
    tmp_path: Path,
) -> None:
    model = make_model("qwen3_5", max_position_embeddings=512)
    path = save(model, tmp_path)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24)
    config = engine_config(path, block_size=16, max_model_len=320, scheduler=scheduler)
    engine = SteppedEngine(config, num_blocks=40)
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (30, 47, 61)]
    prompts = [*made, made[0], [*made[2][:40], 7, 8, 9]]
    sampling = SamplingParams(max_tokens=200, temperature=0.0)
    requests = [
        Request(
            id=RequestId(str(i)),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_s=0.0,
            n=2 if i == 1 else 1,
        )
        for i, prompt in enumerate(prompts)
    ]
    together = engine.run(requests)
    again = engine.run(requests[:1])
    stats = engine.scheduler.stats()
    assert stats.preemptions_total and stats.prefix_hit_tokens_total
    answers = [
        (list(request.prompt_token_ids), ids_of([each for each in outputs if each.index == index]))
        for request, outputs in zip([*requests, requests[0]], [*together, *again], strict=True)
        for index in range(request.n)
    ]
    for prompt, answer in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        # Two tokens whose logits are as close as this may change places.
        assert len(answer) == 200 and (logits.amax(1) - chosen).max() < TOLERANCE


# Wide enough for 4 bits; the output projection reads 320 columns, and an expert's 256.
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 80,
}
_WIDE_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 272}


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("method", [Quantization.INT8, Quantization.INT4, Quantization.FP8])
def test_rounded_at_load_the_compiled_step_computes_what_torch_does_of_the_same_codes(
    method: Quantization, name: str, tmp_path: Path
) -> None:
    path = save(make_model(name, **_WIDE, **(_WIDE_EXPERTS if "moe" in name else {})), tmp_path)
    config = ModelConfig.from_dir(path)
    plan = quantization_plan(method, config, torch.float32)
    assert plan is not None
    assert {each for part in plan.parts for each in part.names if "linear_attn" in each} == {
        f"model.layers.{layer}.linear_attn.{each}"
        for layer, is_recurrent in enumerate(config.recurrent)
        if is_recurrent
        for each in ("in_proj_qkv", "in_proj_z", "out_proj")
    }
    weights = Checkpoint(path, partial(torch.empty, dtype=torch.float32))
    prompts = torch.randint(3, 96, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(1))

    def made(native: bool) -> Harness:
        rounder = Rounder(weights, plan, Arena().empty, Phases(), num_threads=1)
        source = QuantizedWeights(weights, plan.scheme.parts, rounder)
        options = {"weights": source, "make_linear": PlainLinear, "has_codes": native}
        return harness(path, prompts, native, **options)

    expected = made(False).run([(0, 0, PROMPT_LEN)])[0]
    whole = made(True).run([(0, 0, PROMPT_LEN), (1, 0, 9)])[0]
    # Beside int8 and int4 activations are rounded to 8 bits.
    bound = 1e-4 if method is Quantization.FP8 else 0.05
    assert (whole - expected).norm() < bound * expected.norm()
    one_by_one = made(True)
    found = [one_by_one.run([(0, position, 1)])[0] for position in range(PROMPT_LEN)]
    assert torch.equal(torch.cat(found), whole)


def test_they_are_served_in_8_and_4_bits(tmp_path: Path) -> None:
    path = save(make_model("qwen3_5_moe", **_WIDE, **_WIDE_EXPERTS), tmp_path)
    for method in (Quantization.INT8, Quantization.INT4):
        executor = cpu_executor(engine_config(path, quantization=method), path)
        assert executor.info.quantization is not None
        assert executor.info.quantization.method == method


@pytest.mark.parametrize("max_num_seqs", [2, 256])
@pytest.mark.parametrize("budget_mib", [600, 4000])
def test_the_memory_is_divided_between_keys_and_states(
    budget_mib: int, max_num_seqs: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3.5-9B"]))
    config = ModelConfig.from_dir(tmp_path)
    pools = config.kv_layout(8192).pools(config.kv_shape, 16, 2)
    longest = longest_that_fits(pools, budget_mib * 2**20, 8192)
    blocks, states = divide(
        pools,
        budget_mib * 2**20,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_step_tokens=2048,
    )
    assert longest == 8192 and blocks * 16 >= 8192 and 1 <= states <= 3 * max_num_seqs
    taken = blocks * pools[0].block_bytes + states * pools[1].block_bytes
    assert 0.95 * budget_mib * 2**20 < taken <= budget_mib * 2**20
    if budget_mib == 4000 and max_num_seqs == 256:
        # As many conversations of 4096 tokens as there are states for, three for each.
        assert blocks * 16 / 4096 == pytest.approx(states / 3, rel=0.1)


def test_encoders_and_draft_layers_are_not_read(tmp_path: Path) -> None:
    path = save(make_model("qwen3_5_wrapped"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    assert any(name.startswith("model.language_model.") for name in tensors)
    assert any(name.startswith("model.visual.") for name in tensors)
    kept = {n: t for n, t in tensors.items() if not n.startswith("model.visual.")}
    save_file(kept | {"mtp.fc.weight": torch.zeros(2)}, path / "model.safetensors")
    prompts = torch.arange(3, 3 + PROMPT_LEN)[None]
    harness(path, prompts, native=False).run([(0, 0, 9)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 5}, "must be a multiple of linear_num_key_heads"),
        ({"layer_types": ["linear_attention"] * 4}, "at least one of them 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must be"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_gate_rank": 3}, "linear_gate_rank"),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save(make_model("qwen3_5"), tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(InvalidModel, match=message):
        ModelConfig.from_dir(path)


# As they are published, but for long lists.
_TEXT = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3.5-9B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            **_TEXT,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        "vision_config": {"depth": 27, "model_type": "qwen3_5"},
        "vision_start_token_id": 248053,
    },
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {
            **_TEXT,
            "hidden_size": 2048,
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
        },
        "vision_config": {"depth": 27, "model_type": "qwen3_5_moe"},
    },
}


@pytest.mark.parametrize(
    ("name", "billions", "state_mib"), [("Qwen3.5-9B", 8.95, 50), ("Qwen3.5-35B-A3B", 34.66, 63)]
)
def test_a_published_config_gives_the_size_of_the_text_model(
    name: str, billions: float, state_mib: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = ModelConfig.from_dir(tmp_path)
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    state = config.kv_layout(4096).state
    assert state is not None
    assert state.num_bytes / 2**20 == pytest.approx(state_mib, rel=0.05)


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_the_weights_take_the_bytes_that_config_json_implies(name: str, tmp_path: Path) -> None:
    path = save(make_model(name), tmp_path)
    tensors = load_file(path / "model.safetensors")
    of_text = [t for n, t in tensors.items() if not n.startswith("model.visual.")]
    assert ModelConfig.from_dir(path).num_parameters == sum(t.numel() for t in of_text)

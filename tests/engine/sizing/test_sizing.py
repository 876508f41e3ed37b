"""`python -m penstock.engine.sizing`: what fits a device, and how fast it can be at most."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.config import LoraConfig, Quantization
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.models.config import ModelConfig
from penstock.engine.sizing.__main__ import main
from penstock.engine.sizing.planned_model import planned_model
from penstock.engine.sizing.sizing import (
    DEVICES,
    GB,
    OTHER_BYTES,
    Machine,
    Sizing,
)
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request, RequestId, SamplingParams
from tests.docs import tables
from tests.support.changed_models import changed
from tests.support.paths import ROOT
from tests.support.published import PUBLISHED

LLAMA = ROOT / "configs" / "models" / "Llama-3.1-8B"
H100 = Machine(name="H100", memory_bytes=80 * GB)
SCHEDULER = SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=2048)


@pytest.fixture
def sizing() -> Sizing:
    return Sizing(ModelConfig.from_dir(LLAMA), H100)


def test_llama_is_as_large_as_its_card_says(sizing: Sizing) -> None:
    assert sizing.weight_bytes == 2 * 8_030_261_248
    assert sizing.token_bytes == 2 * 32 * 8 * 128 * 2  # K and V, layers, heads, width, bfloat16


@pytest.mark.parametrize(("dtype", "factor"), [("half", 1), ("float16", 1), ("float", 2)])
def test_another_type_takes_the_bytes_of_its_size(
    dtype: str, factor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(LLAMA), "--device", "H100", "--memory-gb", "80", "--dtype", dtype]) == 0
    assert f"| {16.060522496 * factor:.1f} GB | {131_072 * factor:,} |" in capsys.readouterr().out


def test_quantized_weights_count_as_the_gpu_holds_them(tmp_path: Path) -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    model = ModelConfig.from_dir(tmp_path)
    linear, others = 6_979_321_856, 8_030_261_248 - 6_979_321_856
    assert model.weight_bytes(2) == linear + linear * 4 // 128**2 + 2 * others
    # On a GPU, each row of a block has its scale beside it.
    assert Sizing(model, H100).weight_bytes == linear + linear * 4 // 128 + 2 * others


def test_slots_of_adapters_take_memory_from_the_kv_cache(
    sizing: Sizing, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted = replace(sizing, lora=LoraConfig(max_loras=8, max_rank=16))
    # Rows and columns of all linear layers, but for the output layer.
    per_rank = 2 * 8192 + 2 * 5120 + 3 * (4096 + 14336)
    assert adapted.adapter_bytes == 8 * 16 * 32 * per_rank * 2
    assert sizing.kv_bytes - adapted.kv_bytes == adapted.adapter_bytes
    flags = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "64"]
    assert main([str(LLAMA), *flags]) == 0
    assert "4 LoRA adapters of rank 64: 1.34 GB" in capsys.readouterr().out


def test_a_kv_cache_in_8_bits_has_a_scale_for_each_head_and_costs_no_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(LLAMA), "--device", "H100", "--memory-gb", "80"]
    assert main([*arguments, "--kv-cache-dtype", "int8"]) == 0
    assert f"| 16.1 GB | {2 * 32 * 8 * (128 + 4):,} |" in capsys.readouterr().out


def test_the_kv_cache_gets_the_memory_that_is_left(sizing: Sizing) -> None:
    left = 72 * GB - 2 * 8_030_261_248 - OTHER_BYTES
    assert sizing.kv_tokens == left // 131_072
    assert sizing.num_sequences(2_048) == left // 131_072 // 2_048


def test_a_step_takes_at_least_the_time_to_read_all_it_needs(sizing: Sizing) -> None:
    embedding = 128_256 * 4_096  # its rows are gathered, not read
    needed = 2 * (8_030_261_248 - embedding) + 64 * 2_048 * 131_072
    assert sizing.least_tpot_s(64, 2_048) == pytest.approx(needed / 3.35e12)
    # The inverse: this many meet that time if all of the bandwidth is used.
    assert sizing.num_within(needed / 3.35e12 + 1e-9, 2_048, mbu=1.0) == 64
    assert sizing.num_within(1e-3, 2_048, mbu=1.0) == 0  # the weights alone take longer


def test_a_window_bounds_what_a_step_reads(sizing: Sizing) -> None:
    windows = (1_024,) * 8 + (None,) * 24
    windowed = Sizing(changed(sizing.model, windows=windows), H100)
    per_layer = 2 * 8 * 128 * 2
    assert windowed.read_bytes(2_048) == per_layer * (8 * 1_024 + 24 * 2_048)
    assert windowed.read_bytes(512) == sizing.read_bytes(512) == per_layer * 32 * 512
    weights = 2 * sizing.model.num_step_weights
    needed = weights + 64 * windowed.read_bytes(2_048)
    assert windowed.least_tpot_s(64, 2_048) == pytest.approx(needed / 3.35e12)
    assert windowed.num_within(needed / 3.35e12 + 1e-9, 2_048, mbu=1.0) == 64


@pytest.mark.parametrize(
    ("windows", "heads", "least"),
    [
        # The shapes of Gemma 3 27B and of gpt-oss-20b.
        (((1_024,) * 5 + (None,)) * 10 + (1_024,) * 2, (16, 128), 4.0),
        ((128, None) * 12, (8, 64), 1.8),
    ],
    ids=["five windows to one", "every second one"],
)
@pytest.mark.parametrize("gb", [16, 48])
def test_windows_leave_room_for_times_as_many_tokens(
    sizing: Sizing,
    windows: tuple[int | None, ...],
    heads: tuple[int, int],
    least: float,
    gb: int,
) -> None:
    num_kv_heads, head_dim = heads
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    model = changed(sizing.model, windows=windows, mixer=shape)
    weights = Sizing(model, H100).weight_bytes
    machine = Machine(name="H100", memory_bytes=gb * GB + weights, utilization=1.0, other_bytes=0)
    sized = Sizing(model, machine)
    as_before = sized.kv_bytes // sized.token_bytes
    assert sized.kv_tokens >= least * as_before
    # A pool and the blocks that a scheduler gets of it are the same.
    blocks = sized.num_blocks()
    pools = sized.layout.pools(model.kv_shape, 64, 2)
    bytes_of_all = (num * pool.block_bytes for num, pool in zip(blocks, pools, strict=True))
    assert sum(bytes_of_all) <= sized.kv_bytes
    longest = model.max_model_len
    scheduler = Scheduler(
        SchedulerConfig(),
        groups=[KVGroup(*each) for each in zip(blocks, sized.layout.windows, strict=True)],
        block_size=64,
        max_model_len=longest,
    )
    num = 0
    while True:
        prompt = (3 + num,) * (longest - 1)
        sampling = SamplingParams(max_tokens=1)
        request = Request(
            id=RequestId(str(num)), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0
        )
        scheduler.add(request)
        plan = scheduler._kv.plan(scheduler._requests[request.id][0])
        if not scheduler._kv.fits(plan, 0):
            break
        scheduler._kv.admit(scheduler._requests[request.id][0], plan)
        num += 1
    assert num == sized.kv_tokens // longest


def gemma4(name: str, directory: Path) -> Sizing:
    (directory / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return Sizing(ModelConfig.from_dir(directory), H100)


def test_heads_that_differ_between_layers_count_as_they_are(tmp_path: Path) -> None:
    """Of 60 layers, 10 have no window."""
    sizing = gemma4("gemma-4-31B-it", tmp_path)
    sliding, full = 50 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    assert sizing.token_bytes == sliding + full
    assert sizing.read_bytes(8_192) == 1_024 * sliding + 8_192 * full
    window = KVGroup(0, 1_024).most_blocks(262_144, 64)
    assert sizing.bytes_of_one(262_144) == 64 * window * sliding + 262_144 * full
    layout = sizing.layout
    assert [pool.block_bytes for pool in layout.pools(sizing.model.kv_shape, 64, 2)] == [
        64 * full,
        64 * sliding,
    ]


def test_keys_and_values_that_layers_share_are_held_once_and_read_by_each(tmp_path: Path) -> None:
    """Of 35 layers 15 have their own, 3 of them without a window."""
    sizing = gemma4("gemma-4-E2B-it", tmp_path)
    sliding, full = 2 * 256 * 2, 2 * 512 * 2
    assert sizing.token_bytes == 12 * sliding + 3 * full
    assert sizing.read_bytes(8_192) == 28 * 512 * sliding + 7 * 8_192 * full
    window = KVGroup(0, 512).most_blocks(64_000, 64)
    assert sizing.bytes_of_one(64_000) == 64 * window * 12 * sliding + 64_000 * 3 * full
    # A GPU has the table of per-layer inputs in its memory; of it, a step reads next to nothing.
    assert sizing.weight_bytes == 2 * sizing.model.num_parameters
    rows = 2 * 262_144 * 35 * 256
    assert sizing.step_weight_bytes == sizing.weight_bytes - rows
    assert sizing.model.weight_bytes(2) == sizing.weight_bytes - rows  # of a processor
    info = planned_model(sizing, SchedulerConfig()).info
    assert [group.kv_bytes_per_token for group in info.attention] == [7 * full, 28 * sliding]
    assert info.kv_bytes_per_token == sizing.token_bytes


def test_a_model_of_windows_alone_holds_any_length_in_one_window(sizing: Sizing) -> None:
    windowed = Sizing(changed(sizing.model, windows=(4_096,) * 32), H100)
    assert windowed.num_sequences(2_048) == sizing.kv_bytes // 131_072 // 64 // 32
    assert windowed.num_sequences(131_072) == windowed.num_sequences(32_768) > 90
    assert windowed.bytes_of_one(131_072) == (4_096 // 64 + 1) * 64 * 131_072


LLAMA_70B = changed(
    ModelConfig.from_dir(LLAMA),
    hidden_size=8_192,
    num_layers=80,
    mixer={"num_heads": 64},
    mlp={"size": 28_672},
)


def test_a_rank_has_its_share_of_the_weights_and_all_norms() -> None:
    rank = Sizing(LLAMA_70B, H100).on_rank(4)
    attention = 8_192 * (2 * 64 + 2 * 8) * 128 // 4
    of_layer = attention + 3 * 8_192 * 28_672 // 4 + 2 * 8_192
    tables = 2 * 128_256 // 4 * 8_192
    assert rank.weight_bytes == 2 * (80 * of_layer + tables + 8_192)
    assert rank.token_bytes == 80 * 2 * (8 // 4) * 128 * 2
    assert rank.machine.other_bytes > OTHER_BYTES


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_more_ranks_have_more_each_and_together_they_have_all(size: int) -> None:
    whole = Sizing(LLAMA_70B, H100)
    half, rank = whole.on_rank(size // 2), whole.on_rank(size)
    assert whole.weight_bytes / size <= rank.weight_bytes < half.weight_bytes
    assert whole.token_bytes == size * rank.token_bytes
    assert rank.kv_tokens >= half.kv_tokens


def test_a_rank_has_its_share_of_quantized_weights(tmp_path: Path) -> None:
    """Of 70B on two H100: in FP8 as it is stored, and rounded at load."""
    config = json.loads((LLAMA / "config.json").read_text())
    shape = {"hidden_size": 8_192, "intermediate_size": 28_672, "num_hidden_layers": 80}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    of_fp8 = {"num_attention_heads": 64, "quantization_config": fp8} | shape
    (tmp_path / "config.json").write_text(json.dumps(config | of_fp8))
    stored = Sizing(ModelConfig.from_dir(tmp_path), H100)
    rounded = Sizing(LLAMA_70B, H100, quantization=Quantization.INT8)
    for whole in (stored, rounded):
        rank = whole.on_rank(2)
        norms = 161 * 8_192 * 2
        assert 2 * rank.weight_bytes - whole.weight_bytes == norms
        assert 2 * rank.step_weight_bytes - whole.step_weight_bytes == norms
        info = planned_model(whole, SCHEDULER, tensor_parallel_size=2).info
        assert info.weight_bytes == rank.step_weight_bytes


def test_ranks_beyond_the_heads_of_keys_and_values_hold_them_again() -> None:
    """Of 8 heads, 16 ranks have one each."""
    whole = Sizing(LLAMA_70B, H100)
    assert whole.on_rank(16).token_bytes == whole.on_rank(8).token_bytes


def test_what_does_not_fit_is_told_with_how_many_ranks_it_would() -> None:
    for size, of_rank in ((1, ""), (2, " of each rank")):
        with pytest.raises(
            InvalidConfig, match=f"GB{of_rank}, which leaves no room .*use --tensor-parallel-size 4"
        ):
            planned_model(Sizing(LLAMA_70B, H100), SCHEDULER, tensor_parallel_size=size)
    fitting = planned_model(Sizing(LLAMA_70B, H100), SCHEDULER, tensor_parallel_size=4).info
    assert fitting.max_model_len == 131_072
    assert (fitting.tensor_parallel_size, fitting.pipeline_parallel_size) == (4, 1)
    assert (fitting.vocab_size, fitting.num_parameters) == (128_256, LLAMA_70B.num_parameters)
    held = fitting.num_blocks * fitting.block_size * fitting.kv_bytes_per_token
    assert 0.9 * 80 * GB - held > Sizing(LLAMA_70B, H100).on_rank(4).weight_bytes


def test_ranks_are_no_advice_where_they_would_not_help() -> None:
    joined, alone = H100, Machine(name="GH200", memory_bytes=80 * GB)
    for machine, limit in ((joined, 10**6), (alone, None)):
        with pytest.raises(InvalidConfig) as raised:
            planned_model(Sizing(LLAMA_70B, machine), SCHEDULER, kv_cache_memory_bytes=limit)
        assert "--tensor-parallel-size" not in str(raised.value)


def test_ranks_need_to_know_how_their_devices_are_joined() -> None:
    machine = Machine(name="GH200", memory_bytes=141 * GB)
    with pytest.raises(InvalidConfig, match="no link between two --device GH200"):
        planned_model(Sizing(LLAMA_70B, machine), SCHEDULER, tensor_parallel_size=2)


def test_an_unknown_device_has_no_least_time() -> None:
    machine = Machine(name="abacus", memory_bytes=80 * GB)
    assert Sizing(ModelConfig.from_dir(LLAMA), machine).least_tpot_s(1, 1) is None


def test_weights_that_do_not_fit_leave_no_cache() -> None:
    small = Machine(name="L4", memory_bytes=16 * GB)
    assert Sizing(ModelConfig.from_dir(LLAMA), small).kv_tokens == 0


def test_one_more_sequence_costs_its_rows_of_the_device_tables(sizing: Sizing) -> None:
    def num_bytes(max_num_seqs: int) -> int:
        tables = DeviceTables(max_num_seqs, 4_096, 64, [0], torch.device("cpu"))
        return sum(t.nbytes for t in (tables.token_table, *tables.block_tables, tables.lengths))

    logits = 4 * sizing.model.vocab_size
    assert sizing.slot_bytes(4_096) == num_bytes(9) - num_bytes(8) + logits


def test_the_table_has_a_row_for_each_model_and_device() -> None:
    rows = tables.sizing().splitlines()
    assert len(rows) == 2 + 2 * len(DEVICES)
    assert len({row.count("|") for row in rows}) == 1
    assert "| Llama-3.1-8B | H100, 80 GB | 16.1 GB | 131,072 | 403,896 tokens |" in rows[2]


def test_the_command_prints_the_table_and_how_many_meet_a_tpot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--device", "H100", "--memory-gb", "80", "--context", "8192", "--tpot-ms", "20"]
    assert main([str(LLAMA), *flags]) == 0
    printed = capsys.readouterr().out
    assert "403,896 tokens | 49, 20.2 ms |" in printed and "17.2 GB of the KV cache" in printed
    assert "one more of --max-num-seqs at that length: 1.05 MB" in printed
    assert "TPOT 20 ms at MBU 0.66, 8,192 tokens each: 27 together" in printed


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--memory-gb", "0"], "--memory-gb must be positive"),
        (["--context", "0"], "--context must be at least 1"),
        (["--mbu", "66"], "--mbu must be from 0 to 1"),
        (["--device", "abacus", "--tpot-ms", "9"], "not in configs/hardware.toml"),
    ],
)
def test_an_invalid_number_is_explained(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert main([str(LLAMA), *flags]) == 2
    assert sentence in capsys.readouterr().err

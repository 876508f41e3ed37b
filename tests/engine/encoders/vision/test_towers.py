"""Towers of images, against those of transformers, and how they are cut and loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadFormat
from penstock.engine.encoders.blocks import Cut
from penstock.engine.encoders.encoder import InsertRows
from penstock.engine.encoders.vision.tower import Tower
from penstock.engine.errors import InvalidModel
from penstock.engine.executors.cuda.device import Processor
from penstock.engine.loading.encoder import EncoderLoading
from penstock.engine.loading.load import load as load_model
from penstock.engine.memory.pool import kv_pool
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.undeclared import check_tensors
from penstock.engine.process.phases import Phases
from penstock.scheduler.types import Insert
from tests.support.tiny_models import engine_config
from tests.support.towers import FAMILIES, Encoded, encode, random_image, random_model, save_model

_CPU = torch.device("cpu")
# As small as pieces can be.
_SMALL = Cut(16, 1)


def loading(directory: Path, dtype: torch.dtype = torch.float32) -> EncoderLoading:
    config = engine_config(directory, takes_images=True)
    found = EncoderLoading.of(config, directory, ModelConfig.from_dir(directory), dtype, _CPU)
    assert found is not None
    return found


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Tower:
    return loading(directory, dtype).load(LoadFormat.AUTO, 1, Phases())


def cut_small(tower: Tower) -> None:
    weights = tower.weights
    tower.weights = replace(weights, cut=_SMALL)
    for block in tower.blocks:
        block._cut = _SMALL
    for product in weights.products:
        object.__setattr__(product, "cut", _SMALL)


def rows_of(tower: Tower, insert: Insert) -> InsertRows:
    encoding = tower.begin(insert)
    assert encoding.run(600)
    return encoding.rows


def check_and_load(directory: Path) -> Tower:
    start = loading(directory)
    check_tensors(directory, ModelConfig.from_dir(directory), of_encoder=start.names)
    return start.load(LoadFormat.AUTO, 1, Phases())


def assert_close(found: InsertRows, expected: Encoded, tolerance: float = 1e-5) -> None:
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        (found.embeddings, expected.rows),
        (found.deepstack, expected.deepstack),
    ]
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.shape == theirs.shape
            error = (ours.float() - theirs).abs().max() / theirs.abs().max()
            assert error < tolerance, error


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_rows_are_those_of_transformers(family: str, is_cut: bool, tmp_path: Path) -> None:
    model = random_model(family)
    tower = load(save_model(family, model, tmp_path))
    if is_cut:
        cut_small(tower)
    for number, size in enumerate([(40, 24), (30, 90), (64, 64)]):
        expected = encode(family, model, random_image(*size, number))
        assert_close(rows_of(tower, expected.insert), expected)


def test_rows_in_bfloat16_are_near_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_model(family).bfloat16().float()
    expected = encode(family, model, random_image(64, 48))
    rows = rows_of(load(save_model(family, model, tmp_path), torch.bfloat16), expected.insert)
    assert rows.embeddings.dtype is torch.bfloat16
    assert_close(rows, expected, 0.04)


def test_rows_do_not_depend_on_slices_nor_company(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    tower = load(save_model(family, model, tmp_path))
    cut_small(tower)
    inserts = [encode(family, model, random_image(48, 64, seed)).insert for seed in (1, 2)]
    alone = [rows_of(tower, insert) for insert in inserts]
    assert not torch.equal(alone[0].embeddings, alone[1].embeddings)
    encodings = [tower.begin(insert) for insert in inserts]
    num_runs = 0
    while {encoding.run(0.0) for encoding in encodings} != {True}:
        num_runs += 1
    assert num_runs > 50
    for encoding, expected in zip(encodings, alone, strict=True):
        assert torch.equal(encoding.rows.embeddings, expected.embeddings)
        if expected.deepstack is not None:
            assert encoding.rows.deepstack is not None
            assert torch.equal(encoding.rows.deepstack, expected.deepstack)


def test_what_a_tower_takes_is_known_before_it_is_read(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    start = loading(save_model(family, model, tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    of_text = [name for name in stored if "language_model" in name or name.startswith("lm_head")]
    num_others = sum(
        tensor.nbytes
        for name, tensor in stored.items()
        if name not in of_text and "vision_tower.head" not in name
    )
    assert start.info.weight_bytes == num_others
    phases = Phases()
    with phases.timed("weights", "reading", total=num_others):
        start.load(LoadFormat.AUTO, 1, phases)
    insert = encode(family, model, random_image(40, 56)).insert
    assert insert.patches[0] <= start.info.max_patches
    assert start.info.is_whole == family.startswith("gemma")
    num_rows = 1 + (0 if "qwen3_vl" not in family else 2)
    assert start.info.bytes_per_token == num_rows * 4 * model.config.text_config.hidden_size


def test_operations_are_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = random_model(family)
    tower = load(save_model(family, model, tmp_path))
    insert = encode(family, model, random_image(64, 64)).insert
    with FlopCounterMode(display=False) as counter:
        encode_in_training_mode(tower, insert)
    num, info, sizes = insert.patches[0], tower.info, tower.sizes
    # Torch does not count what its attention on processors does.
    attention = len(tower.blocks) * 4 * sizes.num_heads * sizes.head_dim * num**2
    assert info.operations(num) == pytest.approx(counter.get_total_flops() + attention, rel=1e-3)


def encode_in_training_mode(tower: Tower, insert: Insert) -> None:
    """Without inference mode, in which torch counts nothing."""
    for _ in tower.begin(insert)._slices:
        pass


@pytest.mark.parametrize("name", ["missing", "shape", "unknown", "quantized"])
def test_tensors_that_config_json_does_not_imply_are_refused(
    family: str, name: str, tmp_path: Path
) -> None:
    save_model(family, random_model(family), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    ends = ("layers.0.mlp.fc2", "layers.0.mlp.down_proj.linear", "blocks.0.mlp.linear_fc2")
    (index,) = (key for key in tensors if key.endswith(tuple(f"{end}.weight" for end in ends)))
    if name == "missing":
        del tensors[index]
    elif name == "shape":
        tensors[index] = tensors[index][:, 1:].contiguous()
    elif name == "quantized":
        tensors[index] = tensors[index].to(torch.int8)
    else:
        tensors[index.replace("0.mlp", "7.mlp")] = tensors[index].clone()
    save_file(tensors, path)
    with pytest.raises(InvalidModel, match="mlp"):
        check_and_load(tmp_path)


def test_all_tensors_of_a_checkpoint_are_declared(family: str, tmp_path: Path) -> None:
    save_model(family, random_model(family), tmp_path)
    check_and_load(tmp_path)


def test_names_of_older_files_are_read(tmp_path: Path) -> None:
    model = random_model("gemma3")
    path = save_model("gemma3", model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): each
        for name, each in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path)
    expected = encode("gemma3", model, random_image(50, 40))
    assert_close(rows_of(check_and_load(tmp_path), expected.insert), expected)


def test_dummy_weights_make_finite_rows(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    save_model(family, model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tower = loading(tmp_path, torch.bfloat16).load(LoadFormat.DUMMY, 1, Phases())
    insert = encode(family, model, random_image(40, 40)).insert
    assert rows_of(tower, insert).embeddings.isfinite().all()


@pytest.mark.parametrize(
    ("family", "part", "change"),
    [
        ("qwen3_vl", "vision_config", {"hidden_act": "relu"}),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [2, 0]}),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [9]}),
        ("qwen3_5", "vision_config", {"hidden_size": 33}),
        ("qwen3_5", "vision_config", {"rope_parameters": {"rope_type": "yarn"}}),
        ("gemma3", "", {"mm_tokens_per_image": 15}),
        ("gemma4", "vision_config", {"num_key_value_heads": 1}),
        ("gemma4", "vision_config", {"head_dim": 6}),
    ],
)
def test_settings_that_no_tower_has_are_refused_by_name(
    family: str, part: str, change: dict[str, Any], tmp_path: Path
) -> None:
    path = save_model(family, random_model(family), tmp_path) / "config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config).update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match=next(iter(change)).removesuffix("_parameters")):
        loading(tmp_path)


@pytest.mark.parametrize("change", [{"image_mean": [0.5]}, {"image_std": 0}, {"do_rescale": 3}])
def test_settings_of_pixels_are_checked(change: dict[str, Any], tmp_path: Path) -> None:
    path = save_model("qwen3_5", random_model("qwen3_5"), tmp_path) / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidModel, match=next(iter(change))):
        loading(tmp_path)


def test_the_settings_of_images_may_be_in_the_processors_file(tmp_path: Path) -> None:
    model = random_model("qwen3_5")
    path = save_model("qwen3_5", model, tmp_path) / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    expected = encode("qwen3_5", model, random_image(40, 32))
    assert_close(rows_of(load(tmp_path), expected.insert), expected)


def test_no_tower_is_loaded_unless_images_are_taken(tmp_path: Path) -> None:
    save_model("gemma3", random_model("gemma3"), tmp_path)
    others = tmp_path, ModelConfig.from_dir(tmp_path), torch.float32, _CPU
    assert EncoderLoading.of(engine_config(tmp_path), *others) is None
    assert EncoderLoading.of(engine_config(tmp_path, takes_images=True), *others) is not None


def test_a_start_loads_the_tower_beside_the_model(tmp_path: Path) -> None:
    model = random_model("gemma3")
    save_model("gemma3", model, tmp_path)
    config = engine_config(tmp_path, takes_images=True)
    found, without = (
        load_model(each, tmp_path, None, Processor(), Phases())
        for each in (config, replace(config, takes_images=False))
    )
    assert isinstance(found.encoder, Tower)
    assert found.info.encoder == found.encoder.info
    assert (without.encoder, without.info.encoder) == (None, None)
    of_tower = found.encoder.info.weight_bytes
    assert found.ledger.weights - without.ledger.weights == of_tower
    assert found.info.weight_bytes == without.info.weight_bytes
    expected = encode("gemma3", model, random_image(64, 48))
    assert_close(rows_of(found.encoder, expected.insert), expected)


def test_an_image_has_a_default_on_a_processor_and_rows_have_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen3_5", random_model("qwen3_5"), tmp_path)
    free = 320 << 20
    monkeypatch.setattr(kv_pool, "available_memory_bytes", lambda: free)
    config = engine_config(tmp_path, takes_images=True, kv_cache_memory_bytes=None)
    found = load_model(config, tmp_path, None, Processor(), Phases())
    encoder, ledger = found.info.encoder, found.ledger
    assert encoder and encoder.default_patches == 4096
    assert ledger.encoder == encoder.cache_bytes == 256 << 20
    room = free - encoder.cache_bytes - ledger.weights
    assert room // 8 < ledger.kv_pool <= room // 4

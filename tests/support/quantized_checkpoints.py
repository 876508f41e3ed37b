"""Checkpoints in every quantized format that is served, written in numpy from the formats' own
descriptions, without the code that reads them.

Sources: the compressors of the package compressed-tensors, AutoAWQ's `WQLinear_GEMM`, AutoGPTQ's
`qlinear_cuda_old.QuantLinear.pack`, ModelOpt's `export/quant_utils.py`, and for FP8 the class
`FP8Linear` of transformers. tests/formats compares these writers with the formats' packages.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.files.json_file import Fields
from penstock.engine.models.formats.parse import read_quantization
from penstock.engine.models.formats.scheme import Scheme

Array = np.ndarray[Any, Any]
# The tensors of a layer by the ends of their names, and the weight that they stand for.
Packed = tuple[dict[str, Tensor], Array]
Pack = Callable[[Array], Packed]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class QuantizedFormat:
    """name: for people, as docs/quantized.md has it. settings: config.json's quantization_config;
    beside: other files. pack: of a weight (out_features, in_features). weight_format: of the layers
    that are read."""

    name: str
    settings: dict[str, Any]
    pack: Pack
    weight_format: str
    beside: dict[str, Any] = field(default_factory=dict)


def scheme_of(quantized: QuantizedFormat) -> Scheme:
    """Of a layer of such a checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        files = {"config.json": {"quantization_config": quantized.settings or None}}
        for name, content in (files | quantized.beside).items():
            (path / name).write_text(json.dumps(content))
        found = read_quantization(Fields.read(path / "config.json"), path)
    assert found is not None, quantized.name
    scheme = found.scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None, quantized.name
    return scheme


def save_quantized(
    model: Any,
    path: Path,
    quantized: QuantizedFormat,
    plain: tuple[str, ...] = ("lm_head",),
    packs: dict[str, Pack] | None = None,
    *,
    has_experts: bool = False,
) -> Any:
    """Saves transformers' model with its linear layers quantized, and gives it their values.

    plain: parts of names of layers that are not quantized. packs: of layers that are quantized
    otherwise, by parts of their names. has_experts: whether each expert of a mixture is quantized
    too.
    """
    state = pack_layers(model, quantized.pack, plain, packs, has_experts=has_experts)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    replaced = {name.rpartition(".")[0] for name in state}
    kept = {
        name: tensor
        for name, tensor in load_file(file).items()
        if not (has_experts and ".experts." in name)
        and (name.rpartition(".")[0] not in replaced or not name.endswith(".weight"))
    }
    save_file(kept | state, file)
    config = json.loads((path / "config.json").read_text())
    if quantized.settings:
        config["quantization_config"] = quantized.settings
    (path / "config.json").write_text(json.dumps(config))
    for name, content in quantized.beside.items():
        (path / name).write_text(json.dumps(content))
    return model


def pack_layers(
    model: Any,
    pack: Pack,
    plain: tuple[str, ...],
    packs: dict[str, Pack] | None = None,
    *,
    has_experts: bool = False,
) -> dict[str, Tensor]:
    """Gives linear layers the values of their codes, and returns these. The rest: as of
    `save_quantized`."""
    state: dict[str, Tensor] = {}

    def add(name: str, weight: Tensor) -> None:
        others = [each for part, each in (packs or {}).items() if part in name]
        tensors, values = (*others, pack)[0](weight.detach().float().numpy())
        weight.data.copy_(torch.from_numpy(values))
        state.update({f"{name}.{end}": each.contiguous() for end, each in tensors.items()})

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in plain):
            add(name, module.weight)
        if has_experts and name.endswith(".experts"):
            stacks = zip(module.gate_up_proj, module.down_proj, strict=True)
            for number, (both, down) in enumerate(stacks):
                gate, up = both.chunk(2)
                for part, weight in (("gate", gate), ("up", up), ("down", down)):
                    add(f"{name}.{number}.{part}_proj", weight)
    return state


# FP8


def e4m3(values: Array) -> Tensor:
    return torch.from_numpy(values).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def fp8(grid: tuple[int | None, int | None], name: str, dims: int = 2) -> Pack:
    """grid: rows and columns of a block; None for all. dims: of the scales that are stored."""

    def pack(weight: Array) -> Packed:
        rows, columns = weight.shape
        height, width = grid[0] or rows, grid[1] or columns
        scales = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
        by_element = np.zeros_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
                scales[i, j] = np.abs(weight[block]).max() / _E4M3_MAX
                by_element[block] = scales[i, j]
        codes = e4m3(weight / by_element)
        stored = torch.from_numpy(scales)
        tensors = {
            "weight": codes,
            name: stored if dims == 2 else stored.reshape((1,) * dims),
            "input_scale": torch.ones(1),  # of static activations, which have no effect
        }
        return tensors, codes.float().numpy() * by_element

    return pack


# Integers


def rounded(weight: Array, group: int, bits: int, *, symmetric: bool) -> tuple[Array, Array, Array]:
    """Unsigned codes, float16 scales and zeros, one for each group of columns of a row."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group, group)
    middle, most = 2 ** (bits - 1), 2**bits - 1
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = np.maximum(-low, high) / (middle - 1) if symmetric else (high - low) / most
    scales = np.where(scales == 0, 1, scales).astype(np.float16)
    zeros = np.full(scales.shape, middle)
    if not symmetric:
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, most).astype(int)
    codes = np.rint(grouped / scales.astype(np.float32)[..., None]) + zeros[..., None]
    return np.clip(codes, 0, most).astype(int).reshape(rows, columns), scales, zeros


def values(codes: Array, scales: Array, zeros: Array) -> Array:
    group = codes.shape[1] // scales.shape[1]
    numbers = codes - np.repeat(zeros, group, 1)
    weight: Array = numbers * np.repeat(scales.astype(np.float32), group, 1)
    return weight.astype(np.float32)


def in_words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Along the last dimension, the first in the lowest bits: int32. order: which goes where."""
    count = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % count)))
    words = padded.reshape(len(numbers), -1, count).astype(np.uint32)
    packed = np.zeros(words.shape[:2], np.uint32)
    for place, column in enumerate(order or range(count)):
        packed |= words[:, :, column] << np.uint32(place * bits)
    return torch.from_numpy(packed.view(np.int32))


def int8(weight: Array) -> Packed:
    codes, scales, zeros = rounded(weight, weight.shape[1], 8, symmetric=True)
    tensors = {
        "weight": torch.from_numpy((codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(scales).float(),
    }
    return tensors, values(codes, scales, zeros)


def pack_quantized(bits: int, group: int | None, *, symmetric: bool) -> Pack:
    def pack(weight: Array) -> Packed:
        codes, scales, zeros = rounded(weight, group or weight.shape[1], bits, symmetric=symmetric)
        tensors = {
            "weight_packed": in_words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = in_words(zeros.T, bits).t()
        return tensors, values(codes, scales, zeros)

    return pack


def awq(group: int) -> Pack:
    def pack(weight: Array) -> Packed:
        codes, scales, zeros = rounded(weight, group, 4, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": in_words(codes.T, 4, order),
            "qzeros": in_words(zeros.T, 4, order),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return tensors, values(codes, scales, zeros)

    return pack


def gptq(
    bits: int,
    group: int | None,
    *,
    stored_less: int = 1,
    symmetric: bool = True,
    order_seed: int | None = None,
) -> Pack:
    """stored_less: what is subtracted from zeros when they are packed. order_seed: of the order in
    which desc_act has rounded columns, so that those which follow each other are a group."""

    def pack(weight: Array) -> Packed:
        columns = weight.shape[1]
        size = group or columns
        order = np.arange(columns)
        if order_seed is not None:
            order = np.random.default_rng(order_seed).permutation(columns)
        codes, scales, zeros = rounded(weight[:, order], size, bits, symmetric=symmetric)
        place = np.argsort(order)
        ones = {4: 0x11111111, 8: 0x01010101}[bits]
        tensors = {
            "qweight": in_words(codes[:, place], bits).t(),
            "qzeros": in_words(zeros.T, bits) - stored_less * ones,
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(place // size).int(),
        }
        return tensors, np.ascontiguousarray(values(codes, scales, zeros)[:, place])

    return pack


# FP4


def nearest_e2m1(values: Array) -> Array:
    nearest: Array = np.abs(values[..., None] - _E2M1).argmin(-1)
    return nearest


def fp4(group: int, weight_name: str, global_name: str | None, *, divides: bool = False) -> Pack:
    """global_name: of NVFP4's scale for all; None for MXFP4."""

    def pack(weight: Array) -> Packed:
        rows, columns = weight.shape
        grouped = weight.reshape(rows, columns // group, group)
        most = np.abs(grouped).max(-1) / 6
        tensors: dict[str, Tensor] = {}
        if global_name is None:
            exponents = np.ceil(np.log2(most)).astype(int)
            scales = np.exp2(exponents).astype(np.float32)
            tensors["weight_scale"] = torch.from_numpy((exponents + 127).astype(np.uint8))
        else:
            of_all = np.float32(most.max() / _E4M3_MAX)
            stored = np.float32(1 / of_all) if divides else of_all
            small = e4m3((most / of_all).astype(np.float32))
            wide = small.float().numpy()
            scales = wide / stored if divides else wide * stored
            tensors |= {"weight_scale": small, global_name: torch.tensor([stored])}
        codes = nearest_e2m1(grouped / np.maximum(scales, 1e-30)[..., None])
        weights = (_E2M1[codes] * scales[..., None]).reshape(rows, columns).astype(np.float32)
        codes = codes.reshape(rows, columns)
        in_bytes = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        tensors[weight_name] = torch.from_numpy(in_bytes)
        return tensors, weights

    return pack


def compressed(
    format_name: str, activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """quantization_config of compressed-tensors for all linear layers but the output layer."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _float8(**weights: Any) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", symmetric=True, **weights)


def _int(bits: int, *, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": "int", "symmetric": symmetric, **weights}
    return compressed("pack-quantized", **numbers)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True, "group_size": 16}
_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": 16}
_CHANNEL: dict[str, Any] = {"strategy": "channel"}
_NVFP4: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
}
_BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, **_CHANNEL}
_MXFP4: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}

# Every format that is served, at sizes that fit small models: by a short name.
FORMATS = {
    "fp8-tensor": QuantizedFormat(
        "FP8, a scale per tensor",
        _FP8 | {"activation_scheme": "static"},
        fp8((None, None), "weight_scale", dims=1),
        "fp8",
    ),
    "fp8-block": QuantizedFormat(
        "FP8, a scale per block",
        _FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
        fp8((32, 32), "weight_scale_inv"),
        "fp8",
    ),
    "ct-fp8-tensor": QuantizedFormat(
        "compressed-tensors FP8, a scale per tensor",
        _float8(strategy="tensor"),
        fp8((None, None), "weight_scale", dims=1),
        "fp8",
    ),
    "ct-fp8-channel": QuantizedFormat(
        "compressed-tensors FP8, a scale per row (FP8_DYNAMIC)",
        _float8(**_CHANNEL),
        fp8((1, None), "weight_scale"),
        "fp8",
    ),
    "ct-fp8-block": QuantizedFormat(
        "compressed-tensors FP8, a scale per block (FP8_BLOCK)",
        _float8(strategy="block", block_structure=[32, 32]),
        fp8((32, 32), "weight_scale"),
        "fp8",
    ),
    "ct-w8a8": QuantizedFormat(
        "compressed-tensors W8A8",
        compressed("int-quantized", _BY_TOKEN, **_INT8),
        int8,
        "int8",
    ),
    "ct-w4a16": QuantizedFormat(
        "compressed-tensors W4A16",
        _int(4, **_GROUPS),
        pack_quantized(4, 16, symmetric=True),
        "int4",
    ),
    "ct-w4a16-asym": QuantizedFormat(
        "compressed-tensors W4A16, asymmetric",
        _int(4, symmetric=False, **_GROUPS),
        pack_quantized(4, 16, symmetric=False),
        "int4 asymmetric",
    ),
    "ct-w8a16": QuantizedFormat(
        "compressed-tensors W8A16",
        _int(8, **_CHANNEL),
        pack_quantized(8, None, symmetric=True),
        "int8",
    ),
    "ct-w8a16-asym": QuantizedFormat(
        "compressed-tensors W8A16, asymmetric",
        _int(8, symmetric=False, **_GROUPS),
        pack_quantized(8, 16, symmetric=False),
        "int8 asymmetric",
    ),
    "ct-mxfp4": QuantizedFormat(
        "compressed-tensors MXFP4",
        compressed("mxfp4-pack-quantized", **_MXFP4),
        fp4(32, "weight_packed", None),
        "int4 levels",
    ),
    "ct-nvfp4": QuantizedFormat(
        "compressed-tensors NVFP4",
        compressed("nvfp4-pack-quantized", **_NVFP4),
        fp4(16, "weight_packed", "weight_global_scale", divides=True),
        "int4 levels",
    ),
    "awq": QuantizedFormat(
        "AWQ, 4 bits",
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
        | {"zero_point": True, "modules_to_not_convert": None},
        awq(16),
        "int4 asymmetric",
    ),
    "gptq4": QuantizedFormat("GPTQ, 4 bits", _GPTQ | {"bits": 4}, gptq(4, 16), "int4"),
    "gptq8": QuantizedFormat("GPTQ, 8 bits", _GPTQ | {"bits": 8}, gptq(8, 16), "int8"),
    "gptq-v2": QuantizedFormat(
        "GPTQ, version 2",
        _GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"},
        gptq(4, 16, stored_less=0),
        "int4",
    ),
    "gptq-desc-act": QuantizedFormat(
        "GPTQ with desc_act, without groups",
        _GPTQ | {"bits": 4, "group_size": -1, "desc_act": True},
        gptq(4, None),
        "int4",
    ),
    "gptq-act-order": QuantizedFormat(
        "GPTQ with desc_act and groups",
        _GPTQ | {"bits": 4, "desc_act": True},
        gptq(4, 16, order_seed=1),
        "int4",
    ),
    "gptq-asym": QuantizedFormat(
        "GPTQ, 4 bits, asymmetric",
        _GPTQ | {"bits": 4, "sym": False},
        gptq(4, 16, symmetric=False),
        "int4 asymmetric",
    ),
    "gptq8-asym-act-order": QuantizedFormat(
        "GPTQ, 8 bits, version 2, asymmetric, with desc_act and groups",
        _GPTQ | {"bits": 8, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(8, 16, stored_less=0, symmetric=False, order_seed=1),
        "int8 asymmetric",
    ),
    "modelopt-fp8": QuantizedFormat(
        "ModelOpt FP8",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        fp8((None, None), "weight_scale", dims=0),
        "fp8",
    ),
    "modelopt-nvfp4": QuantizedFormat(
        "ModelOpt NVFP4",
        {},
        fp4(16, "weight", "weight_scale_2"),
        "int4 levels",
        {
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": "FP8",
                    "group_size": 16,
                    "exclude_modules": ["lm_head"],
                },
            }
        },
    ),
}

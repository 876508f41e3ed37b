"""The checkpoints that the tests write are those that the formats' own packages write and read."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.formats.packages import imported
from tests.support.quantized_checkpoints import FORMATS, Array

ROWS, COLUMNS = 64, 96
COMPRESSED = [name for name in FORMATS if name.startswith("ct-")]


def weight() -> Array:
    made: Array = np.random.default_rng(3).normal(0, 0.1, (ROWS, COLUMNS)).astype(np.float32)
    return made


def scheme_of(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The compressor of compressed-tensors, and its scheme of the weights."""
    base = imported("compressed_tensors.compressors").BaseCompressor
    scheme = imported("compressed_tensors.quantization").QuantizationScheme
    group = settings["config_groups"]["group_0"]
    compressor = base.get_value_from_registry(settings["format"])
    return compressor, scheme.model_validate(group)


def decompressed(name: str, tensors: dict[str, Tensor]) -> Tensor:
    compressor, scheme = scheme_of(FORMATS[name].settings)
    weight: Tensor = compressor.decompress(tensors, scheme)["weight"]
    return weight.detach().float()


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_reads_the_values(name: str) -> None:
    tensors, expected = FORMATS[name].pack(weight())
    found = decompressed(name, tensors)
    # It multiplies in the type of the scales, or for FP4 in bfloat16.
    tolerance = 2e-2 if "fp4" in name else 1e-3
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_writes_the_same_bytes(name: str) -> None:
    tensors, values = FORMATS[name].pack(weight())
    compressor, scheme = scheme_of(FORMATS[name].settings)
    state = {"weight": torch.from_numpy(values)} | {
        key: tensor for key, tensor in tensors.items() if key.endswith("scale")
    }
    if "mxfp4" in name:
        state["weight_scale"] = torch.exp2(state["weight_scale"].float() - 127)
    state["weight_scale"] = state["weight_scale"].float()
    if "asym" in name:
        zeros = tensors["weight_zero_point"]
        unpack = imported("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
        bits = scheme.weights.num_bits
        shape = (ROWS, state["weight_scale"].shape[1])
        state["weight_zero_point"] = unpack(zeros, bits, torch.Size(shape), packed_dim=0)
    theirs = compressor.compress(state, scheme)
    for key in ("weight_packed", "weight", "weight_zero_point", "weight_shape"):
        assert (key in theirs) == (key in tensors), key
        if key in tensors:
            assert theirs[key].dtype == tensors[key].dtype
            assert bits_of(theirs[key]) == bits_of(tensors[key]), key


def bits_of(tensor: Tensor) -> list[int]:
    listed: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return listed


def test_autoawq_reads_and_writes_the_same_bytes() -> None:
    tensors, values = FORMATS["awq"].pack(weight())
    dequantize = imported("awq.utils.packing_utils").dequantize_gemm
    scales, qzeros = tensors["scales"], tensors["qzeros"]
    found = dequantize(tensors["qweight"], qzeros, scales, 4, 16).t().float()
    torch.testing.assert_close(found, torch.from_numpy(values), rtol=1e-3, atol=0)

    unpack = imported("awq.utils.packing_utils")
    _, zeros = unpack.reverse_awq_order(*unpack.unpack_awq(tensors["qweight"], qzeros, 4), 4)
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = torch.from_numpy(values)
    gemm = imported("awq.modules.linear.gemm").WQLinear_GEMM
    theirs = gemm.from_linear(layer, 4, 16, scales=scales.float(), zeros=(zeros & 15).float())
    assert torch.equal(theirs.qweight, tensors["qweight"])
    assert torch.equal(theirs.qzeros, qzeros)
    assert torch.equal(theirs.scales, scales)


@pytest.mark.parametrize("name", ["gptq4", "gptq8", "gptq-act-order", "gptq-asym"])
def test_autogptq_reads_and_writes_the_same_bytes(name: str) -> None:
    tensors, values = FORMATS[name].pack(weight())
    bits = FORMATS[name].settings["bits"]
    linear = imported("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = torch.from_numpy(values)
    theirs = linear(bits, 16, COLUMNS, ROWS, bias=False, weight_dtype=torch.float32)
    scales = tensors["scales"].float()
    shifted = tensors["qzeros"].unsqueeze(-1) >> torch.arange(0, 32, bits)
    zeros = 1.0 + (shifted & 2**bits - 1).flatten(1)
    theirs.pack(layer, scales.t(), zeros.t(), tensors["g_idx"])
    for key in ("qweight", "qzeros", "g_idx"):
        assert torch.equal(getattr(theirs, key), tensors[key]), key
    x = torch.eye(COLUMNS)
    torch.testing.assert_close(theirs(x).t(), torch.from_numpy(values), rtol=1e-5, atol=1e-7)

"""The compiled step on each kind of processor: conversions, whole steps, the same bits always."""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.layers.linear import MakeLinear, PlainLinear
from penstock.engine.native import compiler, library
from penstock.engine.native.packing import FORMATS
from tests.support.compiler import needs_compiler
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import Harness, make_model, save
from tests.support.weight_formats import coded, in_fp8


@pytest.fixture(scope="module")
def conversions(processor: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of conversions.cpp."""
    path = tmp_path_factory.mktemp("native") / "conversions.so"
    source = Path(__file__).with_name("conversions.cpp")
    _run(
        os.environ.get("CXX", "g++"),
        *_flags_of_step(),
        "-fPIC",
        "-shared",
        source,
        "-o",
        path,
    )
    return ctypes.CDLL(str(path))


@pytest.mark.slow
def test_products_are_right_and_the_same_alone(processor: str, tmp_path: Path) -> None:
    flags = _flags_of_step()
    named = _run(_compiled_products(tmp_path, os.environ.get("CXX", "g++"), *flags))
    assert processor != "tiles" or named.startswith("AMX tiles of bfloat16; codes: AMX tiles")
    if processor == "VNNI":
        assert named.startswith("AVX-512; codes: AVX-512 with VNNI; ")
        flags = _flags("-O1 -Wno-psabi -march=x86-64-v3")
        on_avx2 = _run(_compiled_products(tmp_path, os.environ.get("CXX", "g++"), *flags))
        assert on_avx2.startswith("AVX2; codes: AVX2; ")
        assert named.split("bits: ")[1] == on_avx2.split("bits: ")[1]


@pytest.mark.slow
def test_products_are_right_on_avx512_without_vnni(processor: str, tmp_path: Path) -> None:
    if processor != "VNNI":
        pytest.skip("it is emulated as VNNI is")
    flags = [*_flags_of_step(), "-DWITHOUT_VNNI"]
    named = _run(_compiled_products(tmp_path, os.environ.get("CXX", "g++"), *flags))
    assert named.startswith("AVX-512; codes: AVX-512; ")


@pytest.mark.slow
@pytest.mark.skipif(
    None in (shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")),
    reason="apt-get install g++-aarch64-linux-gnu qemu-user-static",
)
@pytest.mark.parametrize(
    ("march", "products"),
    [
        ("armv8.2-a", "NEON; codes: NEON"),
        ("armv8.2-a+dotprod+bf16", "NEON with matrices of bfloat16; codes: NEON with dot products"),
        (
            "armv8.6-a+bf16+i8mm",
            "NEON with matrices of bfloat16; codes: NEON with matrices of bytes",
        ),
    ],
)
def test_products_are_right_on_arm(march: str, products: str, tmp_path: Path) -> None:
    flags = [*_flags(f"-O1 -march={march}"), "-static"]
    program = _compiled_products(tmp_path, "aarch64-linux-gnu-g++", *flags)
    assert _run("qemu-aarch64-static", "-cpu", "max", program).startswith(products)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86's")
def test_products_compile_to_the_instructions_of_amx(tmp_path: Path) -> None:
    source, assembly = Path(__file__).with_name("products.cpp"), tmp_path / "products.s"
    flags = _flags("-O1 -march=x86-64-v4 -mamx-tile -mamx-int8 -mamx-bf16")
    _run(os.environ.get("CXX", "g++"), *flags, "-S", source, "-o", assembly)
    code = assembly.read_text()
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbsud", "tilerelease"):
        assert instruction in code


def test_every_float16_is_widened_as_by_torch(conversions: ctypes.CDLL) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    vectors, values = torch.empty(2, 2**16).unbind()
    conversions.widened(
        *map(_pointer, (halves,)), ctypes.c_int64(2**16), *map(_pointer, (vectors, values))
    )
    expected = halves.view(torch.float16).float()
    for widened in (vectors, values):
        torch.testing.assert_close(widened, expected, rtol=0, atol=0, equal_nan=True)


def test_floats_are_rounded_as_by_torch_and_what_float16_cannot_hold_is_nan(
    conversions: ctypes.CDLL,
) -> None:
    floats = _floats()
    vectors, values = torch.empty(2, len(floats), dtype=torch.int16).unbind()
    conversions.rounded(
        _pointer(floats), ctypes.c_int64(len(floats)), *map(_pointer, (vectors, values))
    )
    expected = floats.half().float()
    expected[expected.isinf()] = float("nan")
    assert expected.isnan().sum() > 1000 < expected.isfinite().sum()
    for rounded in (vectors, values):
        widened = rounded.view(torch.float16).float()
        torch.testing.assert_close(widened, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("family", "block_size"),
    [("qwen3", 4), ("qwen3", 16), ("llama_biases", 32), ("qwen3_5", 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_step_is_as_near_to_float32_as_torchs(
    processor: str, family: str, block_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    if processor == "tiles" and dtype is not torch.bfloat16:
        pytest.skip("tiles multiply bfloat16 alone")
    path = save(make_model(family), tmp_path)
    ways = ((dtype, True), (dtype, False), (torch.float32, False))
    made = [Harness(path, dtype=d, native=native, block_size=block_size) for d, native in ways]
    for harness in made:
        harness.token_table[0, :90] = torch.arange(90)
    rows = ((0, 0, 19), (0, 19, 1), (0, 20, 1), (0, 21, 60), (0, 81, 1))
    ours, torchs, exact = (
        torch.cat([harness.run([row])[0].float() for row in rows]) for harness in made
    )
    own_error = (torchs - exact).norm()
    assert (ours - exact).norm() < 2 * own_error + 1e-4 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "group", "has_zeros"), [(8, 32, False), (8, 64, True), (4, 16, True), (4, 32, False)]
)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_step_agrees_with_torchs_where_weights_are_codes(
    processor: str, bits: int, group: int, has_zeros: bool, is_ordered: bool, tmp_path: Path
) -> None:
    path = save(make_model("llama_biases"), tmp_path)
    make_linear = coded(bits, group, has_zeros=has_zeros, is_ordered=is_ordered)
    options: dict[str, Any] = {"make_linear": make_linear, "dtype": torch.bfloat16}
    made = [Harness(path, native=native, has_codes=True, **options) for native in (True, False)]
    for harness in made:
        harness.token_table[0, :20] = torch.arange(20)
    for row in ((0, 0, 19), (0, 19, 1)):
        ours, torchs = (harness.run([row])[0] for harness in made)
        # The compiled step rounds activations to 8 bits, and torch does not.
        torch.testing.assert_close(ours, torchs, atol=0.4, rtol=0)


@pytest.mark.parametrize(
    ("bits", "group", "has_zeros"),
    [(8, 32, False), (8, 64, True), (8, 96, False), (4, 16, True), (4, 24, True), (4, 32, False)],
)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_in_float32_codes_give_the_logits_of_the_weights_that_they_stand_for(
    processor: str, bits: int, group: int, has_zeros: bool, is_ordered: bool, tmp_path: Path
) -> None:
    path = save(make_model("llama_biases"), tmp_path)
    make_codes = coded(bits, group, has_zeros=has_zeros, is_ordered=is_ordered)

    def make_plain(weight: Tensor, bias: Tensor | None) -> PlainLinear:
        codes: Any = make_codes(weight, bias)
        return PlainLinear(codes.weight(), bias)

    codes = Harness(path, native=True, has_codes=True, make_linear=make_codes)
    plain, torchs = (
        Harness(path, native=native, make_linear=make_plain) for native in (True, False)
    )
    for harness in (codes, plain, torchs):
        harness.token_table[0, :60] = torch.arange(60)
    for row in ((0, 0, 19), (0, 19, 1), (0, 20, 40)):
        ours, expected, reference = (each.run([row])[0] for each in (codes, plain, torchs))
        assert is_ordered or torch.equal(ours, expected)  # to the bit, as sums have one order
        torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, (16, 32), (32, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_agrees_with_torchs_where_weights_are_fp8(
    processor: str, block: tuple[int, int] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = save(make_model("llama_biases"), tmp_path)
    options: dict[str, Any] = {"has_codes": True, "make_linear": in_fp8(block), "dtype": dtype}
    made = [Harness(path, native=native, **options) for native in (True, False)]
    for harness in made:
        harness.token_table[0, :60] = torch.arange(60)
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 0.4}[dtype]
    for row in ((0, 0, 19), (0, 19, 1), (0, 20, 40)):
        ours, torchs = (harness.run([row])[0] for harness in made)
        torch.testing.assert_close(ours, torchs, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("bits", "group", "has_zeros"), [(8, 32, False), (8, 64, True), (4, 32, False), (4, 72, True)]
)
def test_codes_give_the_same_bits_by_tiles_as_by_vectors(
    processor: str,
    bits: int,
    group: int,
    has_zeros: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if processor != "tiles":
        pytest.skip("it is about tiles")
    path = save(make_model("llama_biases"), tmp_path)
    make_linear = coded(bits, group, has_zeros=has_zeros)
    # With float32 activations are not rounded, and with bfloat16 tiles multiply all else too.
    options: dict[str, Any] = {"make_linear": make_linear, "dtype": torch.float16}
    by_tiles = Harness(path, native=True, has_codes=True, **options)
    monkeypatch.setenv("CXXFLAGS", "-O1 -Wno-psabi -march=native -mno-amx-tile")
    vectors = library.load_library.__wrapped__(torch.float16, frozenset(library.CODE_FORMATS))
    by_vectors = Harness(path, native=True, library=vectors, **options)
    for harness in (by_tiles, by_vectors):
        harness.token_table[:, :120] = torch.arange(480).view(4, 120) % 96
    for rows in ([(0, 0, 7), (1, 0, 1)], [(0, 7, 9)], [(0, 16, 40), (1, 1, 33)], [(2, 0, 119)]):
        for tiles_logits, logits in zip(by_tiles.run(rows), by_vectors.run(rows), strict=True):
            assert torch.equal(tiles_logits, logits)


def in_blocks(path: Path, **kinds: Type) -> Path:
    """A GGUF file with matrices in these types, by their names in it."""
    model = make_model("qwen2", hidden_size=256, intermediate_size=512, num_key_value_heads=4)

    def type_of(name: str) -> Type:
        return next((kind for part, kind in kinds.items() if f"{part}.weight" in name), Type.F32)

    return write_gguf(path / "model.gguf", model, type_of)


# As in files called Q5_K_M and Q4_K_M, and where rows are no whole blocks of 256.
MIXTURES: dict[str, dict[str, Type]] = {
    "Q5_K_M": {
        **dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), Type.Q5_K),
        **dict.fromkeys(("attn_v", "attn_output", "ffn_down", "token_embd"), Type.Q6_K),
    },
    "Q4_K_M": {
        **dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"), Type.Q4_K),
        **dict.fromkeys(("attn_v", "ffn_down"), Type.Q6_K),
        "token_embd": Type.IQ4_XS,
    },
    "Q5_0": {
        **dict.fromkeys(("attn_q", "attn_k", "attn_output"), Type.Q5_0),
        **dict.fromkeys(("attn_v", "ffn_gate", "ffn_up"), Type.Q5_1),
        **dict.fromkeys(("ffn_down", "token_embd"), Type.Q4_1),
    },
    "IQ": {
        **{"attn_q": Type.IQ2_XS, "attn_k": Type.Q3_K, "attn_v": Type.Q2_K},
        **{"ffn_gate": Type.IQ1_S, "ffn_up": Type.IQ3_XXS, "ffn_down": Type.MXFP4},
        **{"attn_output": Type.NVFP4, "token_embd": Type.IQ3_S},
    },
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_step_agrees_with_torchs_where_weights_are_in_blocks(
    processor: str, mixture: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    path = in_blocks(tmp_path, **MIXTURES[mixture])
    options: dict[str, Any] = {"has_codes": True, "kept": AsStored(FORMATS), "dtype": dtype}
    made = [Harness(path, native=native, **options) for native in (True, False)]
    for harness in made:
        harness.token_table[0, :60] = torch.arange(60)
    for row in ((0, 0, 19), (0, 19, 1), (0, 20, 40)):
        ours, torchs = (harness.run([row])[0] for harness in made)
        # The compiled step rounds activations to 8 bits in bfloat16, and torch does not.
        error = (ours - torchs).square().mean().sqrt() / torchs.std()
        assert error < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(("family", "block_size"), [("qwen3", 4), ("llama_biases", 16)])
def test_the_step_agrees_with_torchs_where_keys_and_values_are_codes(
    processor: str, family: str, block_size: int, tmp_path: Path
) -> None:
    path = save(make_model(family), tmp_path)
    made = [
        Harness(path, native=native, kv_dtype=torch.int8, block_size=block_size)
        for native in (True, False)
    ]
    for harness in made:
        harness.token_table[0, :90] = torch.arange(90)
    for row in ((0, 0, 19), (0, 19, 1), (0, 20, 1), (0, 21, 60), (0, 81, 1)):
        ours, torchs = (harness.run([row])[0] for harness in made)
        # The compiled step also rounds queries to 8 bits.
        torch.testing.assert_close(ours, torchs, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("family", "make_linear"),
    [
        *((family, PlainLinear) for family in ("mistral_window", "qwen3", "llama2")),
        *(("qwen3", coded(bits, group)) for bits, group in ((8, 64), (4, 32))),
        ("qwen3", coded(4, 32, is_ordered=True)),
        *(("qwen3", in_fp8(block)) for block in (None, (32, 32))),
        *((mixture, None) for mixture in MIXTURES),
    ],
    ids=[
        *("mistral_window", "qwen3", "llama2"),
        *("int8", "int4", "int4-ordered", "fp8", "fp8-blocks"),
        *MIXTURES,
    ],
)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_token_has_the_same_bits_alone_and_in_company(
    processor: str,
    family: str,
    make_linear: MakeLinear | None,
    kv_dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    if kv_dtype is torch.int8 and (family != "qwen3" or make_linear is not PlainLinear):
        pytest.skip("the KV cache does not know of these differences")
    if make_linear is None:
        path = in_blocks(tmp_path, **MIXTURES[family])
    else:
        path = save(make_model(family), tmp_path)
    options: dict[str, Any] = {
        "make_linear": make_linear or PlainLinear,
        "has_codes": make_linear is not PlainLinear,
        "kv_dtype": kv_dtype,
        "dtype": torch.float32 if kv_dtype is torch.float32 else torch.bfloat16,
    }
    # A block of 4 positions is read row by row, and larger ones as they are packed.
    alone, together = (
        Harness(path, native=True, **sizes, **options)
        for sizes in ({"threads": 1, "block_size": 4}, {"threads": 2, "block_size": 16})
    )
    tokens = torch.randint(96, (4, 120), generator=torch.Generator().manual_seed(1))
    for harness in (alone, together):
        harness.token_table[:, :120] = tokens
    expected = [
        torch.cat([alone.run([(slot, start, 1)])[0] for start in range(120)]) for slot in range(4)
    ]
    starts = [0] * 4
    for counts in ((1, 40, 7, 90), (64, 33, 1, 29), (50, 17, 100, 1), (5, 30, 12, 0)):
        rows = [(slot, starts[slot], count) for slot, count in enumerate(counts) if count]
        for (slot, start, count), logits in zip(rows, together.run(rows), strict=True):
            assert torch.equal(logits, expected[slot][start : start + count])
            starts[slot] = start + count
    assert starts == [120] * 4


@pytest.mark.parametrize("window", [None, 700])
def test_a_long_context_has_the_same_bits_when_threads_share_it(
    processor: str, window: int | None, tmp_path: Path
) -> None:
    if processor not in ("tiles", "native"):
        pytest.skip("it does not depend on how vectors are multiplied")
    options: dict[str, Any] = {
        "max_position_embeddings": 2048,
        "sliding_window": window,
        "num_hidden_layers": 2,
    }
    path, length = save(make_model("mistral_window", **options), tmp_path), 1200
    alone, shared = (
        Harness(
            path,
            1,
            dtype=torch.bfloat16,
            native=True,
            threads=threads,
            max_len=2048,
            block_size=block_size,
        )
        for threads, block_size in ((1, 4), (3, 16))
    )
    tokens = torch.randint(96, (length,), generator=torch.Generator().manual_seed(1))
    for harness in (alone, shared):
        harness.token_table[0, :length] = tokens
    [expected] = alone.run([(0, 0, length)])
    shared.run([(0, 0, 490)])
    for start in [*range(490, 540), *range(1000, 1100)]:
        if start == 1000:
            shared.run([(0, 540, 460)])
        [logits] = shared.run([(0, start, 1)])
        assert torch.equal(logits[0], expected[start]), start


def _flags(more: str) -> list[str]:
    return ["-std=c++20", f"-I{compiler.ENGINE}", *shlex.split(more)]


def _flags_of_step() -> list[str]:
    return _flags(os.environ["CXXFLAGS"] or "-O1 -Wno-psabi -march=native")


def _compiled_products(directory: Path, compiler: str, *flags: str) -> Path:
    program = directory / "products"
    _run(compiler, *flags, Path(__file__).with_name("products.cpp"), "-o", program)
    return program


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _floats() -> Tensor:
    """All float16 and their neighbours, the middle between each two, and random bits."""
    halves = (
        torch.arange(2**15 - 2**10, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    )
    middles = (halves[:-1] + halves[1:]) / 2
    exact = torch.cat((halves, middles, torch.tensor([65519.0, 65520.0, 1e9, float("inf")])))
    bits = exact.view(torch.int32)
    near = torch.cat((bits, bits[1:] - 1, bits[:-1] + 1)).view(torch.float32)
    noise = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    floats = torch.cat((near, -near, noise.to(torch.int32).view(torch.float32)))
    return floats[: len(floats) // 16 * 16].contiguous()


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())

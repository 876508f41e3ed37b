"""What `make bench-peers` makes for the peers: models, installations, and their command lines."""

import shlex
from itertools import pairwise
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
import transformers

from tests.bench.in_turns.server import parse_server
from tests.bench.peers.__main__ import main
from tests.bench.peers.compare import (
    FROM_CHECKPOINT,
    Files,
    NoKernel,
    commands,
    comparison,
    has_bf16,
    make_file,
    usable,
    vllm_has_int4,
)
from tests.bench.peers.install import (
    PEERS,
    InstallFailed,
    Peer,
    fit_peers,
    install,
    why_no_zentorch,
)
from tests.bench.peers.models import CHECKPOINTS, SHAPES, write_checkpoint, write_model
from tests.formats.quality import harness_of, logits_of

_SMALL = {
    "vocab_size": 3000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_FILES = Files(
    Path("/m/135m"), Path("/m/135m.gguf"), Path("/m/135m-openvino"), Path("/m/135m-w8a8")
)


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_has_every_weight_that_its_shape_needs(name: str, tmp_path: Path) -> None:
    write_model(SHAPES[name] | _SMALL, tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    _, info = auto.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info


def test_a_model_s_tokenizer_has_the_whole_vocabulary(tmp_path: Path) -> None:
    write_model(SHAPES["135m"] | _SMALL, tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 3000
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"
    made_up = tokenizer.decode([2999])
    assert made_up.strip().isalpha() and made_up.startswith(" ")
    assert tokenizer.encode(made_up * 3) == [2999] * 3


def test_the_shapes_have_the_sizes_that_their_names_say() -> None:
    auto: Any = transformers.AutoModelForCausalLM
    for name, least, most in (
        ("135m", 134e6, 136e6),
        ("500m", 490e6, 500e6),
        ("hybrid", 540e6, 560e6),
    ):
        shape = SHAPES[name]
        with torch.device("meta"):
            model = auto.from_config(transformers.AutoConfig.for_model(**shape))
        assert least < sum(each.numel() for each in model.parameters()) < most


@pytest.mark.parametrize("has", [True, False])
def test_each_command_is_one_that_penstock_bench_peers_takes(has: bool) -> None:
    found = commands(_FILES, Path("/peers"), [2, 5], has_bf16=has)
    assert found.keys() == PEERS.keys()
    for name, command in found.items():
        argv = parse_server(f"{name}={command}").argv(port=81, model="/m/135m", threads=2)
        assert "81" in argv and "32" in argv and not any("{" in word for word in argv)
    kv_precision = "bf16" if has else "f16"
    assert f"--kv-precision {kv_precision} " in found["openvino"]
    for name in ("vllm", "zentorch"):
        words = shlex.split(found[name])
        assert "VLLM_CPU_OMP_THREADS_BIND=2,5" in words and "/m/135m-w8a8" in words
        assert f"/peers/{name}/bin/python" in words


@pytest.mark.parametrize(
    ("flags", "has"), [("fpu avx512f avx512_bf16", True), ("fpu avx512f avx2", False)]
)
def test_bfloat16_is_used_where_the_processor_has_it(flags: str, has: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: any\nflags\t\t: {flags}\n")
    assert has_bf16(cpuinfo) is has


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("fpu avx2 avx512f avx512bw avx512dq avx512vl", True),
        ("fpu avx2", False),
        ("asimd bf16", True),
    ],
)
def test_vllm_has_kernels_of_4_bits_but_for_avx2(flags: str, has: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {flags}\n")
    assert vllm_has_int4(cpuinfo) is has


def test_vllm_is_left_out_of_int4_in_one_line_where_it_has_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bench.peers.compare.vllm_has_int4", lambda: False)
    with pytest.raises(NoKernel, match="vllm is left out: without AVX-512"):
        make_file("vllm", "135m", tmp_path, "int4")
    assert not [*tmp_path.iterdir()]


def test_what_is_installed_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, peer in PEERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "installed").write_text("\n".join(peer.requirements) + "\n")
    assert main(["install", "--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("is installed in") == len(fit_peers())


@pytest.mark.parametrize(
    ("vendor", "flags", "fits"),
    [
        ("AuthenticAMD", "fpu avx2 avx512f avx512_bf16", True),
        ("AuthenticAMD", "fpu avx2 avx512f", False),
        ("AuthenticAMD", "fpu avx2", False),
        ("GenuineIntel", "fpu avx2 avx512f avx512_bf16", False),
    ],
)
def test_zentorch_is_left_out_where_it_would_not_be_used_or_would_crash(
    vendor: str, flags: str, fits: bool, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    reason = why_no_zentorch(cpuinfo)
    assert reason is None if fits else reason and "AVX-512" in reason and "\n" not in reason


def test_a_peer_that_is_left_out_is_one_line_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(home: Path, requirements: tuple[str, ...]) -> None:
        if home.name == "broken":
            raise CalledProcessError(1, ["pip", "install", *requirements])

    peers = {
        "good": Peer(("a==1",), make),
        "broken": Peer(("b==1",), make),
        "unfit": Peer(("c==1",), make, lambda: "this processor is too small"),
    }
    for module in ("compare", "install"):
        monkeypatch.setattr(f"tests.bench.peers.{module}.PEERS", peers)
    found, left_out = usable(peers, tmp_path)
    assert found == ["good"]
    assert left_out == {
        "broken": "broken: pip install b==1 ... failed, as said above",
        "unfit": "unfit is left out: this processor is too small",
    }
    assert capsys.readouterr().err.splitlines() == [*left_out.values()]
    assert fit_peers() == ["good", "broken"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_the_same_model_in_codes(name: str, tmp_path: Path) -> None:
    """Penstock computes from it nearly what it does from the model."""
    model, checkpoint = tmp_path / "model", tmp_path / name
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # groups of 32 divide them
    write_model(SHAPES["135m"] | _SMALL | sizes, model)
    write_checkpoint(model, checkpoint, CHECKPOINTS[name])
    text = torch.arange(3, 40)[None]
    expected, found = (logits_of(harness_of(folder), text) for folder in (model, checkpoint))
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < (0.02 if name == "w8a8" else 0.15), error
    before, after = ((each / "model.safetensors").stat().st_size for each in (model, checkpoint))
    assert after < before


def test_int8_and_int4_compare_vllm_and_penstock_with_the_same_checkpoint(tmp_path: Path) -> None:
    command = comparison("135m", tmp_path, ["vllm", "llama"], 2, "int4", ["--rounds", "1"])
    servers = dict(flag.split("=", 1) for before, flag in pairwise(command) if before == "--server")
    assert [*servers] == ["penstock", FROM_CHECKPOINT, "vllm", "llama"]
    assert "{model} --port {port}" in servers["penstock"]
    assert servers["penstock"].endswith("--quantization int4")
    plain = ["--speculative-config", '{"num_speculative_tokens": 0}']
    for own in ("penstock", FROM_CHECKPOINT):
        words = shlex.split(servers[own])
        assert words[words.index(plain[0]) :][:2] == plain
    model = str(tmp_path / "models" / "135m-w4a16")
    assert model in servers["vllm"] and model in servers[FROM_CHECKPOINT]
    assert "--quantization" not in servers[FROM_CHECKPOINT]
    assert "135m-q4_0.gguf" in servers["llama"] and command[-2:] == ["--rounds", "1"]
    others = comparison("135m", tmp_path, ["llama"], 2, "int4", [])
    assert not any(FROM_CHECKPOINT in word for word in others)


def test_without_a_compiler_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallFailed, match="apt-get install cmake"):
        install("llama", PEERS["llama"], tmp_path)
    assert not (tmp_path / "llama" / "installed").exists()


def test_an_unknown_flag_of_install_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "--cases", "8x8@1"]) == 2
    assert capsys.readouterr().err == "install takes no --cases\n"

"""What `make bench-peers` makes for the peers: models, installations, and their command lines."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.bench.in_turns.server import parse_server
from tests.bench.peers.__main__ import main
from tests.bench.peers.compare import Files, commands, has_bf16
from tests.bench.peers.install import PEERS, InstallFailed, install
from tests.bench.peers.models import SHAPES, write_model

_SMALL = {
    "vocab_size": 3000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_FILES = Files(Path("/m/135m"), Path("/m/135m.gguf"), Path("/m/135m-openvino"))


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


def test_the_shapes_have_the_sizes_that_their_names_say() -> None:
    auto: Any = transformers.AutoModelForCausalLM
    for name, least, most in (("135m", 134e6, 136e6), ("500m", 490e6, 500e6)):
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
    assert "VLLM_CPU_OMP_THREADS_BIND=2,5" in shlex.split(found["vllm"])


@pytest.mark.parametrize(
    ("flags", "has"), [("fpu avx512f avx512_bf16", True), ("fpu avx512f avx2", False)]
)
def test_bfloat16_is_used_where_the_processor_has_it(flags: str, has: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: any\nflags\t\t: {flags}\n")
    assert has_bf16(cpuinfo) is has


def test_what_is_installed_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, peer in PEERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "installed").write_text("\n".join(peer.requirements) + "\n")
    assert main(["install", "--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("is installed in") == len(PEERS)


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

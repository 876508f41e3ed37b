"""What a library multiplies with is tried on the machine that it is to compute on."""

import logging
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.engine.models.errors import WrongProducts
from penstock.engine.native import compiler
from penstock.engine.native.library import load_library
from tests.engine.conftest import EMULATION
from tests.support.compiler import needs_compiler
from tests.support.tiny_models import Harness, make_model, save

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are x86's"),
]
_WRONG_VECTORS = Path(__file__).with_name("wrong_vectors.h")
_ROW = [(0, 0, 40)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(make_model("qwen3"), tmp_path / "model")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine on which nothing was tried yet. What others have compiled is linked again, so that
    it is another library, which does not know what they have found."""
    compiled = compiler.cache_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler.cache_directory().mkdir(parents=True)
    for each in compiled.glob("*.o"):
        (compiler.cache_directory() / each.name).symlink_to(each)
    load_library.cache_clear()
    yield monkeypatch
    load_library.cache_clear()


def _native(checkpoint: Path) -> Harness:
    return Harness(checkpoint, dtype=torch.bfloat16, native=True, block_size=16)


def _logits(harness: Harness) -> torch.Tensor:
    harness.token_table[0, :90] = torch.arange(90)
    return harness.run(_ROW)[0].clone()


def _products(harness: Harness) -> str:
    return str(harness.model.products)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_tiles_that_are_slower_than_vectors_are_timed_once_and_not_used(
    checkpoint: Path, own_cache: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own_cache.setenv("CXXFLAGS", f"-O1 -Wno-psabi {EMULATION}")
    assert "tiles" not in _products(_native(checkpoint))
    [said] = [each.message for each in caplog.records if "as long as vectors" in each.message]
    assert said.startswith("AMX tiles of bfloat16 take ")
    caplog.clear()
    assert "tiles" not in _products(_native(checkpoint))
    assert "as long as vectors" not in caplog.text


def test_whether_to_prefetch_for_few_rows_is_timed_once_on_a_machine(
    checkpoint: Path, own_cache: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    logits = []
    for num_timed in (1, 0):
        caplog.clear()
        logits.append(_logits(_native(checkpoint)))
        said = [each for each in caplog.records if "with prefetching" in each.message]
        assert len(said) == num_timed
    assert torch.equal(*logits)


@pytest.mark.slow
def test_tiles_that_multiply_wrongly_are_refused_and_the_rest_is_right(
    checkpoint: Path, own_cache: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _logits(_native(checkpoint))
    own_cache.setenv("CXXFLAGS", f"-O1 -Wno-psabi {EMULATION} -DPENSTOCK_WRONG_TILES")
    load_library.cache_clear()
    harness = _native(checkpoint)
    assert "AMX tiles of bfloat16 give wrong products on this processor" in caplog.text
    assert "tiles of bfloat16" not in _products(harness)
    torch.testing.assert_close(_logits(harness), expected, atol=0.1, rtol=0)


@pytest.mark.slow
def test_a_step_whose_vectors_multiply_wrongly_is_refused(
    checkpoint: Path, own_cache: pytest.MonkeyPatch
) -> None:
    if "fma" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor multiplies without the instructions that are made wrong")
    own_cache.setenv("CXXFLAGS", f"-O1 -Wno-psabi -include {_WRONG_VECTORS}")
    with pytest.raises(WrongProducts, match="wrong products with weights in the format 'plain'"):
        _native(checkpoint)


def test_a_trial_leaves_the_weights_as_they_are_and_finds_this_machine_right(
    checkpoint: Path,
) -> None:
    ours = _native(checkpoint)
    torchs = Harness(checkpoint, dtype=torch.bfloat16, native=False, block_size=16)
    torch.testing.assert_close(_logits(ours), _logits(torchs), atol=0.4, rtol=0)

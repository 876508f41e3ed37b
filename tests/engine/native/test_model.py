"""The compiled step: optional, and cached if possible."""

import logging
import os
import re
import time
from pathlib import Path

import pytest
import torch

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import UnsupportedFeature, UnsupportedWeightFormat
from penstock.engine.native.library import load_library
from penstock.engine.native.model import NativeModel, check_features
from tests.support.compiler import needs_compiler
from tests.support.tiny_models import Harness, make_model, save
from tests.support.weight_formats import NegatedLinear, coded, reversed_config

CPUINFO = Path("/proc/cpuinfo").read_text()


def test_without_a_compiler_a_warning_is_logged_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_library.__wrapped__(torch.float32) is None
    assert "install g++" in caplog.text


@pytest.fixture
def _quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies what was compiled before."""
    library = load_library(torch.float32)
    assert library
    compiler = tmp_path / "quick-c++"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{library._name}" "$last"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))


@needs_compiler
@pytest.mark.usefixtures("_quick_compiler")
@pytest.mark.parametrize("cache", ["a file", None])
def test_without_a_cache_directory_the_library_is_compiled_for_this_start_alone(
    cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache:
        (tmp_path / cache).touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    else:  # a user without an entry in the password database

        def unknown(uid: int) -> None:
            raise KeyError(uid)

        monkeypatch.setattr("pwd.getpwuid", unknown)
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    made = load_library.__wrapped__(torch.float32)
    assert made and made.penstock_step
    assert not Path(made._name).exists()


@needs_compiler
@pytest.mark.usefixtures("_quick_compiler")
def test_what_a_killed_compilation_left_is_removed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "penstock"
    left, running = cache / "compiling-left", cache / "compiling-running"
    for directory in (left, running):
        directory.mkdir(parents=True)
        (directory / "native.so").touch()
    an_hour_ago_s = time.time() - 3600
    os.utime(left, (an_hour_ago_s, an_hour_ago_s))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_library.__wrapped__(torch.float32)
    assert not left.exists() and running.exists()


@pytest.mark.slow
@needs_compiler
def test_what_multiplies_codes_is_named_apart(tmp_path: Path) -> None:
    path = save(make_model("llama2"), tmp_path)
    plain = Harness(path, native=True).model
    codes = Harness(path, native=True, has_codes=True, make_linear=coded(8, 32)).model
    assert isinstance(plain, NativeModel) and isinstance(codes, NativeModel)
    named = re.fullmatch(rf"{re.escape(plain.products)} \(codes: (.+)\)", codes.products)
    assert named and "codes" not in plain.products
    assert ("VNNI" in named[1]) == bool(re.search(r"\bavx(512)?_vnni\b", CPUINFO))


@needs_compiler
def test_a_weight_format_that_is_not_compiled_is_refused_by_name(tmp_path: Path) -> None:
    path = save(make_model("llama2"), tmp_path)
    with pytest.raises(UnsupportedWeightFormat, match="'negated', which the compiled CPU step"):
        Harness(path, native=True, make_linear=NegatedLinear)


def test_a_flag_that_is_not_compiled_is_refused_by_name(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save(make_model("llama_biases"), tmp_path))
    check_features(config, torch.float32)
    with pytest.raises(UnsupportedFeature, match="has is_reversed, which the compiled CPU step"):
        check_features(reversed_config(config), torch.float32)

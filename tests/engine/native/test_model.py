"""The compiled step: optional, and cached if possible."""

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import UnsupportedFeature, UnsupportedWeightFormat
from penstock.engine.models.parts.mlp.config import Activation
from penstock.engine.native.features import check_features
from penstock.engine.native.library import load_library
from penstock.engine.native.model import NativeModel
from tests.support.changed_models import changed
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


_QUICK_COMPILER = """#!/bin/sh
for last; do :; done
case "$last" in *.o) sleep 0.1; basename "$last" >> "$0.log";; esac
cp "{library}" "$last"
"""


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """It copies what was compiled before. Returns the sources that it has been given, each time."""
    library = load_library(torch.float32)
    assert library
    compiler = tmp_path / "quick-c++"
    compiler.write_text(_QUICK_COMPILER.format(library=library._name))
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    log = Path(f"{compiler}.log")

    def taken() -> list[str]:
        names = [line.partition("-")[0] for line in log.read_text().splitlines()]
        log.unlink()
        return sorted(names)

    return taken


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
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
@pytest.mark.usefixtures("quick_compiler")
def test_what_a_killed_compilation_left_is_removed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "penstock" / "native"
    left, running = cache / "compiling-left", cache / "compiling-running"
    for directory in (left, running):
        directory.mkdir(parents=True)
        (directory / "native.so").touch()
    an_hour_ago_s = time.time() - 3600
    os.utime(left, (an_hour_ago_s, an_hour_ago_s))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_library.__wrapped__(torch.float32)
    assert not left.exists() and running.exists()


@needs_compiler
def test_another_model_compiles_only_what_none_before_has_used(
    quick_compiler: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_library.__wrapped__(torch.float32)
    assert quick_compiler() == ["attention", "plain", "step"]
    assert load_library.__wrapped__(torch.bfloat16, frozenset({"int8", "fp8"}))
    assert quick_compiler() == ["attention", "fp8", "grouped", "plain"]
    assert load_library.__wrapped__(
        torch.bfloat16, frozenset({"int4 asymmetric"}), has_coded_kv=True
    )
    assert quick_compiler() == ["attention"]
    in_blocks = frozenset({"blocks of int6"})
    assert load_library.__wrapped__(torch.float32, in_blocks, has_coded_kv=True)
    assert quick_compiler() == ["blocks"]


@needs_compiler
def test_starts_at_the_same_time_compile_each_source_once(
    quick_compiler: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(3) as starts:  # for which locks are as for processes
        made = list(starts.map(load_library.__wrapped__, [torch.float32] * 3))
    assert all(made) and quick_compiler() == ["attention", "plain", "step"]
    assert not list(tmp_path.rglob("*.lock"))


@needs_compiler
def test_libraries_of_one_process_share_nothing() -> None:
    library = load_library(torch.bfloat16, frozenset({"int8"}))
    assert library
    command = ["nm", "--dynamic", "--defined-only", library._name]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert "penstock_step" in names
    assert all(name.startswith("penstock_") for name in names)


@pytest.mark.slow
@needs_compiler
def test_what_multiplies_codes_is_named_apart(tmp_path: Path) -> None:
    path = save(make_model("llama2"), tmp_path)
    options: dict[str, Any] = {"native": True, "dtype": torch.bfloat16}
    plain = Harness(path, **options).model
    codes = Harness(path, has_codes=True, make_linear=coded(8, 32), **options).model
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
    with pytest.raises(UnsupportedFeature, match="has Reversed, which the compiled CPU step"):
        check_features(reversed_config(config), torch.float32)


def test_layers_that_the_compiled_step_would_take_for_equal_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save(make_model("llama2"), tmp_path))
    other = changed(config, mlp={"activation": Activation(is_gelu=True)})
    check_features(other, torch.float32)
    mixed = replace(config, layers=(other.layers[0], *config.layers[1:]))
    with pytest.raises(UnsupportedFeature, match="differ in norms or activations, which the comp"):
        check_features(mixed, torch.float32)

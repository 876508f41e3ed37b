"""`penstock bench` against another project's server, and its report in a real browser."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.loadtest.bench.cli import main
from penstock.loadtest.workload.token_counter import tokenizer_counter
from tests.support.browser import NewPage
from tests.support.paths import ROOT
from tests.support.serving import free_port, running_server
from tests.support.stub_server import Exchange, stub

MODEL = str(ROOT / "engine" / "hub" / "demo_model")
# `transformers serve`; the package is a dependency of ours anyway.
_SERVE = "from transformers.cli.transformers import main; main()"
_START_TIMEOUT_S = 120.0

# Text outside its drawing, and labels of one drawing that overlap.
_OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
  const out = texts.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1
    || b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => t.textContent);
  texts.forEach(([t, a], i) => texts.slice(i + 1).forEach(([u, b]) => {
    if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
      out.push(t.textContent + ' on ' + u.textContent); }));
  return out;
})"""
_EMPTY = """[...document.querySelectorAll('figure')].filter(f =>
  !f.querySelector('polyline[points*=","], circle, rect')).map(f => f.textContent)"""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `transformers serve` with the demo model."""
    log = tmp_path_factory.mktemp("peer") / "log"
    port = free_port()
    flags = ["serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", MODEL]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.argv[1:] = {flags!r}; {_SERVE}"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, log)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"transformers serve did not start; pip install '.[ops]'? {log.read_text()[-900:]}")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_same_command_measures_another_server(
    peer: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That server lists no models without a cache, rejects ignore_eos, and sends no [DONE]."""
    flags = ["--base-url", peer, "--backend", backend, "--num-prompts", "4", "--tokenizer", MODEL]
    flags += ["--random-input-len", "20", "--random-output-len", "12", "--prompt-format", "text"]
    flags += ["--max-concurrency", "2", "--save-result", "--save-detailed"]
    saved = ["--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main([*flags, *saved, "--model", MODEL]) == 1
    assert "give --no-ignore-eos" in capsys.readouterr().err
    assert main([*flags, *saved, "--model", MODEL, "--no-ignore-eos"]) == 0
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["uncounted"]) == (4, 0)
    counted = tokenizer_counter(Path(MODEL))(result["generated_texts"])
    for by_server, by_tokenizer in zip(result["output_lens"], counted, strict=True):
        assert by_server <= 12 and abs(by_server - by_tokenizer) <= 2
    assert 0 < result["median_tpot_ms"] < result["median_e2el_ms"]


_DARK = {"name": "prefers-color-scheme", "value": "dark"}
# Smaller, and nobody reads it.
_SMALL = """[...document.querySelectorAll('svg text')].filter(t =>
  t.getBoundingClientRect().height < 9).map(t => t.textContent)"""


async def refuse(exchange: Exchange) -> None:
    await exchange.head("500 Internal Server Error", "Content-Length: 2")
    await exchange.write(b"no")


def reports(folder: Path) -> dict[str, Path]:
    """One report of each kind."""
    common = ["--random-input-len", "8", "--json"]
    paths = {
        name: folder / f"{name}.html"
        for name in ("many", "one", "token", "sweep", "failed", "compared")
    }
    with running_server("--scripted-step-ms", "10", "--max-num-seqs", "4") as server:
        many = ["--num-prompts", "60", "--request-rate", "40"]
        sweep = [
            "--sweep",
            "--goodput",
            "ttft:150",
            "--sweep-seconds",
            "1",
            "--sweep-precision",
            "0.5",
        ]
        compared = [str(folder / f"{number}.json") for number in range(2)]
        for saved in compared:
            few = [*many, "--random-output-len", "20", "--save-result", "--result-filename", saved]
            main(["--base-url", server.url, *common, *few])
        main(["compare", *compared, "--html", str(paths["compared"])])
        for name, flags in {
            "many": [*many, "--random-output-len", "20"],
            "one": ["--num-prompts", "1", "--random-output-len", "20"],
            "token": ["--num-prompts", "1", "--random-output-len", "1"],
            "sweep": [*sweep, "--request-rate", "8", "--random-output-len", "10"],
        }.items():
            main(["--base-url", server.url, *common, *flags, "--report", str(paths[name])])
    with stub(refuse) as peer:
        failing = ["--num-prompts", "9", "--num-warmups", "0", "--report", str(paths["failed"])]
        assert main(["--base-url", peer.url, *common, *failing]) == 1
    return paths


def test_every_kind_of_report_is_readable_in_a_browser(new_page: NewPage, tmp_path: Path) -> None:
    for name, path in reports(tmp_path).items():
        page = new_page()
        for scheme, width in (("light", 1340), ("dark", 1340), ("light", 400)):
            page.emulate(width=width, height=900, scheme=scheme)
            page.open(path.as_uri())
            assert page.js("document.querySelectorAll('svg').length") >= 2, name
            assert page.js(_OVERLAPS) == [], (name, width)
            assert page.js(_EMPTY) == [], (name, width)
            assert page.js(_SMALL) == [], (name, width)
            assert page.js("document.documentElement.scrollWidth <= innerWidth"), (name, width)
        page.call("Emulation.setEmulatedMedia", media="print", features=[_DARK])
        assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.call("Emulation.setEmulatedMedia", media="", features=[])
        ink = page.js("getComputedStyle(document.body).color")
        page.emulate(width=1340, height=900, scheme="dark")
        assert page.js("getComputedStyle(document.body).color") != ink
        assert {url.partition(":")[0] for url in page.urls()} <= {"file", "data"}
        if name == "failed":
            assert "9 failed: HTTP 500: no" in page.text()

"""The Dockerfiles, executed step by step in fresh Debian roots: `make test-ops`, some minutes."""

import re
import subprocess
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.ops.image import Container, Image, build, missing_tools, remove, running, stages
from tests.serving import ROOT

CPU, CUDA = ROOT / "docker" / "Dockerfile.cpu", ROOT / "docker" / "Dockerfile"
_START_TIMEOUT_S = 120.0
_ASK = """
import json, urllib.request as u
body = {"model": "penstock-demo", "prompt": "Once upon a time", "max_tokens": 8}
request = u.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                    {"Content-Type": "application/json"})
print(u.urlopen(request, timeout=60).read().decode())
"""
_ASK_PAGE = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').read().decode())"
# Says "begun" at the first chunk, and at the end what the stream ended with.
_STREAM = """
import json, urllib.request as u
body = {"model": "penstock-demo", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True,
        "stream": True}
request = u.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                    {"Content-Type": "application/json"})
lines = (line for line in u.urlopen(request, timeout=120) if line.strip())
next(lines); open("/cache/begun", "w").close()
print(list(lines)[-1].decode())
"""

_LOAD_BRIDGE = """
from triton.backends.nvidia.driver import CudaUtils
print(CudaUtils().launch.__name__)
"""
_ASK_PTXAS = """
import subprocess, triton
print(subprocess.check_output([triton.knobs.nvidia.ptxas.path, "--version"], text=True))
"""

needs_tools = pytest.mark.skipif(missing_tools() is not None, reason=missing_tools() or "")


@pytest.fixture(scope="module")
def cpu_image() -> Iterator[Image]:
    yield build(CPU)
    remove(CPU)


@pytest.fixture(scope="module")
def cuda_image() -> Iterator[Image]:
    """Without torch and its gigabytes of CUDA, and without what else the CPU image has as well."""
    triton = f"/opt/penstock/bin/pip install --no-cache-dir triton=={version('triton')}"
    package = "/opt/penstock/bin/pip install --no-cache-dir --no-deps ."
    yield build(CUDA, replaced={"torch==": triton, ".[otel]": package})
    remove(CUDA)


@pytest.mark.parametrize("dockerfile", [CPU, CUDA], ids=lambda path: path.name)
def test_the_image_says_the_version_of_the_package(dockerfile: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    final = stages(dockerfile)[-1]
    assert ("ARG", f'VERSION="{project["version"]}"') in final.steps


@needs_tools
@pytest.mark.timeout(360)
def test_the_cpu_image_builds_answers_is_healthy_and_drains(
    cpu_image: Image, tmp_path: Path
) -> None:
    print(f"\nfiles of the CPU image: {cpu_image.num_bytes() / 1e9:.2f} GB")
    with running(cpu_image, tmp_path / "cache") as container:
        _wait_until_ready(container)
        assert container.execute("id", "-u").stdout.strip() == "10001"
        assert container.execute("touch", "/opt/penstock/file").returncode != 0
        assert container.execute(*cpu_image.healthcheck).returncode == 0
        answer = container.execute("python3", "-c", _ASK, timeout_s=90)
        assert '"finish_reason":"length"' in answer.stdout, answer.stderr
        page = container.execute("python3", "-c", _ASK_PAGE)
        assert "<html" in page.stdout, page.stderr
        compiled = list((tmp_path / "cache" / "penstock").glob("native-*.so"))
        assert len(compiled) == 1  # the fast path, not torch's operators
        ended = _stop_during_a_stream(container, tmp_path / "cache" / "begun")
        assert ended.strip() == "data: [DONE]"
        assert container.process.wait(timeout=60) == 0


@needs_tools
@pytest.mark.timeout(120)
def test_the_healthcheck_of_an_image_fails_where_no_server_is(
    cpu_image: Image, tmp_path: Path
) -> None:
    idle = Image(**{**vars(cpu_image), "entrypoint": ["sleep"]})
    with running(idle, tmp_path / "cache", "60") as container:
        assert container.execute(*cpu_image.healthcheck).returncode != 0


@needs_tools
@pytest.mark.timeout(240)
def test_triton_reaches_the_driver_in_an_image_without_a_compiler(
    cuda_image: Image, tmp_path: Path
) -> None:
    print(f"\nfiles of the CUDA image without torch: {cuda_image.num_bytes() / 1e9:.2f} GB")
    idle = Image(**{**vars(cuda_image), "entrypoint": ["sleep"]})
    with running(idle, tmp_path / "cache", "200") as container:
        for name in ("cc", "gcc", "g++", "clang", "tcc"):
            assert container.execute("which", name).returncode != 0, name
        _driver_of_empty_functions(cuda_image, tmp_path / "cache" / "libcuda.so.1")
        loaded = container.execute("env", "LD_LIBRARY_PATH=/cache", "python3", "-c", _LOAD_BRIDGE)
        assert loaded.stdout.strip() == "launch", loaded.stderr
        assert list((tmp_path / "cache" / "triton").rglob("cuda_utils*.so"))
        ptxas = container.execute("python3", "-c", _ASK_PTXAS)
        assert "release" in ptxas.stdout, ptxas.stderr


@needs_tools
@pytest.mark.timeout(60)
def test_the_cuda_image_says_why_it_compiles_no_other_c(cuda_image: Image, tmp_path: Path) -> None:
    idle = Image(**{**vars(cuda_image), "entrypoint": ["sleep"]})
    with running(idle, tmp_path / "cache", "50") as container:
        compiler = cuda_image.env["CC"]
        done = container.execute(compiler, "/etc/hostname", "-O3", "-o", "/cache/library.so")
        assert done.returncode == 1 and "install gcc" in done.stderr
        assert not (tmp_path / "cache" / "library.so").exists()


def _driver_of_empty_functions(image: Image, library: Path) -> None:
    """In the place of NVIDIA's, which no machine without a GPU has."""
    source = (image.root / "opt/penstock/triton/cuda_utils.c").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", source)))
    functions = "".join(f"void {name}(void) {{}}\nvoid {name}_v2(void) {{}}\n" for name in names)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=functions, text=True, check=True)


def _wait_until_ready(container: Container) -> None:
    code = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=4)"
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while container.execute("python3", "-c", code).returncode != 0:
        assert container.process.poll() is None, container.process.stdout and (
            container.process.stdout.read()
        )
        assert time.monotonic() < deadline_s, "it was not ready in time"
        time.sleep(0.5)


def _stop_during_a_stream(container: Container, begun: Path) -> str:
    """What the stream ends with when SIGTERM comes in its midst."""
    stream = container.start("python3", "-c", _STREAM)
    deadline_s = time.monotonic() + 60
    while not begun.exists():
        assert stream.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.01)
    container.stop()
    output, errors = stream.communicate(timeout=90)
    assert stream.returncode == 0, errors
    return output

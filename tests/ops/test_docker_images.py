"""The Dockerfiles, built by buildah and run by podman: `make test-ops`, ten minutes at first."""

import re
import subprocess
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from tests.support.image import (
    IMAGES,
    Container,
    build,
    build_empty_torch,
    config_of,
    fresh_volume,
    layers,
    missing_tools,
    running,
)
from tests.support.paths import ROOT
from tests.support.serving import wait_until

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_START_TIMEOUT_S = 240.0
_LOAD_BRIDGE = """
from triton.backends.nvidia.driver import CudaUtils
print(CudaUtils().launch.__name__)
"""
_COUNT_CORES = "from penstock.engine.memory.machine import num_cores; print(num_cores())"
_ASK_PTXAS = """
import subprocess, triton
print(subprocess.check_output([triton.knobs.nvidia.ptxas.path, "--version"], text=True))
"""

pytestmark = [
    pytest.mark.skipif(missing_tools() is not None, reason=missing_tools() or ""),
    pytest.mark.timeout(1800),  # whichever runs first builds the image
]


@pytest.fixture(scope="module")
def cpu_image() -> str:
    return build(ROOT / "docker" / "Dockerfile.cpu", IMAGES["cpu"])


@pytest.fixture(scope="module")
def cuda_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With an empty torch, since the real one has gigabytes. Triton and everything else is real."""
    wheels = tmp_path_factory.mktemp("wheels")
    [torch] = [name for name in PROJECT["dependencies"] if name.startswith("torch==")]
    build_empty_torch(wheels, torch.removeprefix("torch=="), version("triton"))
    return build(ROOT / "docker" / "Dockerfile", IMAGES["gpu"], find_links=wheels)


@pytest.fixture
def volume() -> Iterator[str]:
    with fresh_volume() as name:
        yield name


@pytest.fixture(params=["cpu_image", "cuda_image"])
def image(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_the_image_has_the_configuration_that_docker_uses(image: str) -> None:
    config = config_of(image)
    print(f"\n{image}: {config['Size'] / 1e9:.2f} GB")
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"][-3:] == ["serve", "--host", "0.0.0.0"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"]
    assert list(config["Volumes"]) == ["/cache"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.version"] == PROJECT["version"]
    assert ("NVIDIA_VISIBLE_DEVICES=all" in config["Env"]) == (image == IMAGES["gpu"])


def test_new_code_is_a_small_layer_above_torch(image: str) -> None:
    (size, made_by), (_, made_below_by), *_ = layers(image)
    assert "COPY" in made_by and "COPY" in made_below_by
    number, unit = size.split()
    assert unit == "MB" and float(number) < 30, size


def test_the_cpu_image_loads_answers_and_drains(cpu_image: str, volume: str) -> None:
    with running(cpu_image, volume) as container:
        wait_until(lambda: _status(container, "/ready") == 503, timeout_s=_START_TIMEOUT_S)
        assert not container.is_healthy()  # while it loads, Docker's status is "starting"
        _wait_until_ready(container)
        assert container.is_healthy()
        assert "<html" in httpx.get(container.url).text
        answer = _post(container, max_tokens=8)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        compiled = container.execute("find", "/cache/penstock", "-name", "native-*.so")
        assert compiled.stdout.count("native-") == 1  # the fast path, not torch's operators
        assert _last_line_when_stopped(container) == "data: [DONE]"
        assert container.wait() == 0


def test_the_container_has_no_more_rights_than_it_needs(cpu_image: str, volume: str) -> None:
    with running(cpu_image, volume, "60", entrypoint="sleep") as container:
        assert container.execute("id", "-u").stdout.strip() == "10001"
        assert container.execute("touch", "/opt/penstock/file").returncode != 0
        assert container.execute("touch", "/cache/file", "/tmp/file").returncode == 0
        for name in ("pip.conf", "pip"):  # of the machine that built the image
            assert container.execute("test", "-s", f"/etc/{name}").returncode != 0


def test_a_second_start_compiles_nothing(cpu_image: str, volume: str) -> None:
    for _ in range(2):
        with running(cpu_image, volume) as container:
            _wait_until_ready(container)
            seconds = re.search(r"compile: ([\d.]+) s", container.logs())
            assert container.stop() == 0
    assert seconds and float(seconds[1]) < 1


def test_the_server_honours_the_containers_limits(cpu_image: str, volume: str) -> None:
    limits = ("--memory=2g", "--cpus=1")
    with running(cpu_image, volume, limits=limits) as container:
        _wait_until_ready(container)
        total = re.search(r"total +([\d.]+)", container.logs())
        assert total and float(total[1]) == pytest.approx(2.0, abs=0.01)  # GiB, not the machine's
        cores = container.execute("python3", "-c", _COUNT_CORES)
        assert cores.stdout.strip() == "1", cores.stderr


def test_orphans_of_an_exec_are_reaped(cpu_image: str, volume: str) -> None:
    with running(cpu_image, volume) as container:
        container.execute("sh", "-c", "sleep 0.1 & true")
        wait_until(lambda: "(sleep)" not in _processes(container))


def test_a_container_without_a_server_is_unhealthy(cpu_image: str, volume: str) -> None:
    with running(cpu_image, volume, "60", entrypoint="sleep") as container:
        assert not container.is_healthy()


def test_an_invalid_flag_ends_the_container_with_a_message(cpu_image: str, volume: str) -> None:
    with running(cpu_image, volume, "--max-num-seqs", "0") as container:
        wait_until(lambda: not container.is_running(), timeout_s=60)
        assert "--max-num-seqs" in container.logs()


def test_triton_reaches_the_driver_in_an_image_without_a_compiler(
    cuda_image: str, volume: str, tmp_path: Path
) -> None:
    with running(cuda_image, volume, "100", entrypoint="sleep") as container:
        for name in ("cc", "gcc", "g++", "clang", "tcc"):
            assert container.execute("which", name).returncode != 0, name
        source = container.execute("cat", "/opt/penstock/triton/cuda_utils.c").stdout
        driver = _driver_of_empty_functions(source, tmp_path)
        container.put(driver, "/cache/libcuda.so.1")
        loaded = container.execute("env", "LD_LIBRARY_PATH=/cache", "python3", "-c", _LOAD_BRIDGE)
        assert loaded.stdout.strip() == "launch", loaded.stderr
        assert "cuda_utils" in container.execute("find", "/cache/triton").stdout
        ptxas = container.execute("python3", "-c", _ASK_PTXAS)
        assert "release" in ptxas.stdout, ptxas.stderr


def test_the_cuda_image_explains_why_it_compiles_no_other_c(cuda_image: str, volume: str) -> None:
    with running(cuda_image, volume, "50", entrypoint="sleep") as container:
        done = container.execute("sh", "-c", "$CC /etc/hostname -O3 -o /cache/library.so")
        assert done.returncode == 1 and "install gcc" in done.stderr
        assert container.execute("test", "-e", "/cache/library.so").returncode != 0


def _driver_of_empty_functions(source: str, directory: Path) -> Path:
    """Replaces NVIDIA's, which a machine without a GPU does not have."""
    library = directory / "libcuda.so.1"
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", source)))
    functions = "".join(f"void {name}(void) {{}}\nvoid {name}_v2(void) {{}}\n" for name in names)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=functions, text=True, check=True)
    return library


def _processes(container: Container) -> str:
    return container.execute("sh", "-c", "cat /proc/[0-9]*/stat").stdout


def _status(container: Container, path: str) -> int:
    """0 if the server does not respond yet."""
    try:
        return httpx.get(container.url + path, timeout=5).status_code
    except httpx.TransportError:
        assert container.is_running(), container.logs()
        return 0


def _wait_until_ready(container: Container) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while _status(container, "/ready") != 200:
        assert time.monotonic() < deadline_s, container.logs()
        time.sleep(0.2)


def _post(container: Container, **fields: object) -> httpx.Response:
    body = {"model": "penstock-demo", "prompt": "Once upon a time"} | fields
    return httpx.post(container.url + "/v1/completions", json=body, timeout=90)


def _last_line_when_stopped(container: Container) -> str:
    """The last line of a stream during which the container receives SIGTERM."""
    body = {"model": "penstock-demo", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
    url = container.url + "/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=90) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        container.terminate()
        return list(lines)[-1]

"""Which build of torch `make` installs: real pip, on indexes of empty wheels."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import install_torch
from tests.support.package_index import package_index
from tests.support.serving import free_port

PIN = "torch==2.13.0"
CUDA, CPU = "torch-2.13.0", "torch-2.13.0+cpu"


class Machine:
    """One with its own directory of devices, and pip configured with one index."""

    def __init__(self, directory: Path, indexes: ExitStack) -> None:
        self.root = directory / "root"
        self.root.mkdir()
        self.installed_to = directory / "installed"
        self._directory = directory
        self._indexes = indexes

    def index(self, name: str, *wheels: str) -> str:
        return self._indexes.enter_context(package_index(self._directory / name, *wheels))

    def install(self, *flags: str) -> int:
        return install_torch.main([*flags, PIN], self.root)

    @property
    def installed(self) -> list[str]:
        return sorted(each.stem for each in self.installed_to.glob("*.dist-info"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with ExitStack() as indexes:
        machine = Machine(tmp_path, indexes)
        for name, value in {
            "CONFIG_FILE": "/dev/null",
            "EXTRA_INDEX_URL": "",
            "FIND_LINKS": "",
            "INDEX_URL": machine.index("pypi", CUDA),
            "NO_CACHE_DIR": "1",
            "TARGET": str(machine.installed_to),
        }.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        yield machine


def test_without_an_nvidia_device_the_cpu_build_of_the_named_index_is_installed(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert machine.install("--index", machine.index("pytorch", CPU)) == 0
    assert machine.installed == [CPU]
    assert capfd.readouterr().out.startswith(
        "torch: the CPU build, because this machine has no NVIDIA device; "
        "TORCH=cuda chooses a build for CUDA\n"
    )


def test_a_cpu_build_that_pip_finds_by_itself_needs_no_other_index(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", machine.index("local", CUDA, CPU))
    assert machine.install("--index", f"http://127.0.0.1:{free_port()}/simple") == 0
    assert machine.installed == [CPU]
    assert "127.0.0.1" not in capfd.readouterr().err  # the other index was not asked


def test_an_index_that_cannot_be_reached_leaves_what_pip_finds_and_says_so(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    unreachable = f"http://127.0.0.1:{free_port()}/simple"
    assert machine.install("--index", unreachable) == 0
    assert machine.installed == [CUDA]
    out = capfd.readouterr().out
    assert f"{unreachable} lacks it or cannot be reached" in out
    assert "TORCH_INDEX=... names another" in out


def test_where_no_index_is_named_uv_installs_the_cpu_build(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for uv, whose real index no test can reach, that records how it is called."""
    calls = tmp_path / "calls"
    put(
        tmp_path / "stand-in/uv.py",
        f"import sys; open({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"))
    assert machine.install() == 0
    assert machine.installed == []
    [_, call] = calls.read_text().splitlines()
    assert call == f"pip install --python {sys.executable} --torch-backend=cpu {PIN}+cpu"


def test_without_uv_either_what_pip_finds_is_installed_and_it_says_so(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert machine.install() == 0
    assert machine.installed == [CUDA]
    assert "what follows may bring gigabytes of CUDA" in capfd.readouterr().out


def test_with_an_nvidia_device_the_build_for_cuda_is_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    put(machine.root / "dev/nvidiactl", "")
    monkeypatch.setenv("PIP_INDEX_URL", machine.index("local", CUDA, CPU))
    assert machine.install("--index", machine.index("pytorch", CPU)) == 0
    assert machine.installed == [CUDA]
    assert "TORCH=cpu chooses the CPU build" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "is_nvidia"),
    [
        ("dev/nvidiactl", "", True),
        ("usr/lib/wsl/lib/libcuda.so.1", "", True),
        ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n", True),
        ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x8086\n", False),
    ],
)
def test_a_device_is_found_by_its_driver_or_its_vendor(
    file: str, text: str, is_nvidia: bool, tmp_path: Path
) -> None:
    put(tmp_path / file, text)
    assert install_torch.has_nvidia_device(tmp_path) == is_nvidia


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)


def test_a_choice_is_followed_whatever_devices_there_are(machine: Machine) -> None:
    pytorch = machine.index("pytorch", CPU)
    assert machine.install("--build", "cuda", "--index", pytorch) == 0
    assert machine.installed == [CUDA]


@pytest.mark.slow
def test_the_cpu_build_by_choice_is_installed_or_refused(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert machine.install("--build", "cpu") == 1
    assert machine.installed == []
    assert "name another with TORCH_INDEX=..." in capfd.readouterr().out
    assert machine.install("--build", "cpu", "--index", machine.index("pytorch", CPU)) == 0
    assert machine.installed == [CPU]

"""Builds the images of docker/ with buildah and runs them with podman: real containers, no daemon.

No image registry is used: debootstrap builds the base image under the name in the Dockerfiles.
Layers stay in build/docker, as Docker keeps its own; `make clean` removes them.
"""

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.release.version import version
from tests.support.package_index import empty_wheel
from tests.support.paths import ROOT
from tests.support.serving import free_port

# As `make images`, compose.yaml, the manifests and the chart call them.
IMAGES = {"gpu": f"penstock:{version()}", "cpu": f"penstock:{version()}-cpu"}
BUILD_DIR = ROOT / "build" / "docker"
_BASES = {"debian:12.12-slim": "bookworm"}
_STORE = (f"--root={BUILD_DIR / 'store'}", "--runroot=/run/penstock-docker")
_PODMAN = ("podman", *_STORE)
# runc is Docker's runtime too. The settings need neither systemd nor a journal, and set no limits
# that a sandbox forbids.
_SETTINGS = """
[containers]
default_ulimits = ["nofile={num_files}:{num_files}", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[network]
network_backend = "netavark"
"""
_TOOLS = ("buildah", "podman", "runc", "iptables", "debootstrap")


def missing_tools() -> str | None:
    """What to do before images can be built on this machine, or None."""
    if any(shutil.which(tool) is None for tool in _TOOLS):
        return "apt-get install buildah podman runc iptables debootstrap"
    if os.geteuid() != 0:
        return "run as root: the tests create root file systems and containers"
    return None


def build(dockerfile: Path, name: str, *, find_links: Path | None = None) -> str:
    """Like `docker build`, with this machine's settings of pip, and no index besides.

    find_links: replaces this machine's own directories of wheels.
    """
    for base, suite in _BASES.items():
        _import_base(f"docker.io/library/{base}", suite)
    mounts = _pip_mounts(find_links)
    options = (
        "--isolation=chroot",
        "--network=host",
        "--pull-never",
        "--layers",
        "--format=docker",
        "--build-arg=TORCH_INDEX=",
    )
    _run(
        "buildah", *_STORE, "bud", *options, *mounts, f"--tag={name}", f"--file={dockerfile}", ROOT
    )
    return name


def config_of(image: str) -> dict[str, Any]:
    """The configuration as in `docker inspect`, with the size in bytes as Size."""
    inspected = json.loads(_podman("image", "inspect", image))[0]
    return {**inspected["Config"], "Size": inspected["Size"]}


def layers(image: str) -> list[tuple[str, str]]:
    """(size, instruction) of each layer with files, the last first."""
    lines = _podman("history", "--no-trunc", "--format={{.Size}}\t{{.CreatedBy}}", image)
    pairs = (line.split("\t", 1) for line in lines.splitlines())
    return [(size, made_by) for size, made_by in pairs if size != "0 B"]


class Container:
    """Like `docker run -d` in compose.yaml: a port on loopback, a volume, a read-only root."""

    def __init__(
        self,
        image: str,
        volume: str,
        *arguments: str,
        entrypoint: str = "",
        limits: tuple[str, ...] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.id = _podman(
            "run",
            "--detach",
            f"--publish=127.0.0.1:{self.port}:8000",
            f"--volume={volume}:/cache",
            "--read-only",
            "--read-only-tmpfs=false",
            "--tmpfs=/tmp",
            "--cap-drop=all",
            "--security-opt=no-new-privileges",
            *([f"--entrypoint={entrypoint}"] if entrypoint else []),
            *limits,
            image,
            *arguments,
        ).strip()

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return _tried(*_PODMAN, "exec", self.id, *command)

    def is_healthy(self) -> bool:
        """Runs HEALTHCHECK's command now."""
        return _tried(*_PODMAN, "healthcheck", "run", self.id).returncode == 0

    def logs(self) -> str:
        done = _tried(*_PODMAN, "logs", self.id)
        return done.stdout + done.stderr

    def is_running(self) -> bool:
        return self._state()["Running"] is True

    def put(self, file: Path, path: str) -> None:
        """Writes a file as the image's user, with that user's permissions."""
        command = [*_PODMAN, "exec", "--interactive", self.id, "sh", "-c", 'cat > "$0"', path]
        subprocess.run(command, input=file.read_bytes(), env=_environment(), check=True)

    def terminate(self) -> None:
        """Sends SIGTERM without waiting."""
        _podman("kill", "--signal=TERM", self.id)

    def wait(self) -> int:
        """Waits for the end. Returns the exit code, 137 if it was killed."""
        return int(_podman("wait", self.id))

    def stop(self) -> int:
        """Like `docker stop -t 45`. Returns the exit code."""
        _podman("stop", "--time=45", self.id)
        return self.wait()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(_podman("inspect", self.id))[0]["State"]
        return state


@contextlib.contextmanager
def running(
    image: str,
    volume: str,
    *arguments: str,
    entrypoint: str = "",
    limits: tuple[str, ...] = (),
) -> Iterator[Container]:
    container = Container(image, volume, *arguments, entrypoint=entrypoint, limits=limits)
    try:
        yield container
    finally:
        _podman("rm", "--force", "--time=0", container.id)


@contextlib.contextmanager
def fresh_volume() -> Iterator[str]:
    """A new volume, which gets the owner of the image's /cache as Docker's volumes do."""
    name = _podman("volume", "create").strip()
    try:
        yield name
    finally:
        _podman("volume", "rm", "--force", name)


def build_empty_torch(directory: Path, version: str, triton: str) -> None:
    """Writes an empty wheel named torch that depends on Triton, as the CUDA build does."""
    empty_wheel(directory, f"torch-{version}+empty", requires=f"triton=={triton}")


def _import_base(name: str, suite: str) -> None:
    if _tried(*_PODMAN, "image", "exists", name).returncode == 0:
        return
    root = BUILD_DIR / f"debian-{suite}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    _run("debootstrap", "--variant=minbase", suite, root)
    archive = root.with_suffix(".tar")
    _run("tar", "-C", root, "-cf", archive, ".")
    shutil.rmtree(root)
    _podman("import", "--change=CMD bash", str(archive), name)
    archive.unlink()


def _pip_mounts(find_links: Path | None) -> list[str]:
    """Mounts this machine's pip settings and the directories in them into the build."""
    listed = _run(sys.executable, "-m", "pip", "config", "list")
    settings = dict(re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    mounts = []
    if certificates := settings.get("cert"):
        settings["cert"] = "/run/certificates.pem"
        mounts.append(f"--volume={certificates}:/run/certificates.pem:ro")
    if find_links:
        settings["find-links"] = str(find_links)
    paths = re.findall(r"(?:^|\s|file://)(/\S+)", " ".join(settings.values()))
    # The pages of an index, PATH/simple, link to files in PATH.
    directories = {path.removesuffix("/simple") for path in paths if Path(path).is_dir()}
    mounts += [f"--volume={path}:{path}:ro" for path in sorted(directories)]
    file = BUILD_DIR / "pip.conf"
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    file.write_text("[global]\n" + "".join(lines), encoding="utf-8")
    return [*mounts, f"--volume={file}:/etc/pip.conf:ro"]


def _podman(*arguments: str) -> str:
    return _run(*_PODMAN, *arguments)


def _run(*command: str | Path) -> str:
    done = _tried(*command)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def _tried(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, env=_environment())


def _environment() -> dict[str, str]:
    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    file = BUILD_DIR / "containers.conf"
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    file.write_text(_SETTINGS.format(num_files=num_files), encoding="utf-8")
    return {**os.environ, "CONTAINERS_CONF": str(file)}

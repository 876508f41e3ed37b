"""Builds and runs docker/'s images without a Docker engine: each step in a fresh Debian root.

It reads what our Dockerfiles use of the language and refuses the rest. Linux's namespaces stand for
the engine: a root, a process tree and a network of its own. Needs root, debootstrap, util-linux.
"""

import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.serving import ROOT, wait_until

WORKSHOP = ROOT / "build" / "docker"
_SUITES = {"debian:12": "bookworm"}
_TOOLS = ("debootstrap", "unshare", "nsenter", "chroot", "ip")
# What changes nothing that runs here.
_DESCRIPTIVE = ("LABEL", "EXPOSE", "VOLUME", "STOPSIGNAL")


@dataclass(kw_only=True)
class Stage:
    name: str
    suite: str
    steps: list[tuple[str, str]] = field(default_factory=list)


@dataclass(kw_only=True)
class Image:
    """A root directory, and what a Dockerfile says of running it."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(
            path.lstat().st_size
            for path in self.root.rglob("*")
            if path.is_file() and not path.is_symlink()
        )


def missing_tools() -> str | None:
    """What to do before images can be built here, or None."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"install debootstrap, util-linux and iproute2 (no {', '.join(missing)} here)"
    if os.geteuid() != 0:
        return "run it as root: it makes root directories and namespaces"
    return None


def stages(dockerfile: Path) -> list[Stage]:
    found: list[Stage] = []
    for keyword, arguments in _instructions(dockerfile.read_text(encoding="utf-8")):
        if keyword == "FROM":
            base, _, name = arguments.partition(" AS ")
            suite = next(suite for prefix, suite in _SUITES.items() if base.startswith(prefix))
            found.append(Stage(name=name or "final", suite=suite))
        else:
            found[-1].steps.append((keyword, arguments))
    return found


def build(dockerfile: Path, *, replaced: dict[str, str] | None = None) -> Image:
    """The last stage's image; `replaced` gives other commands for RUN steps that hold its keys."""
    images: dict[str, Image] = {}
    for stage in stages(dockerfile):
        image = Image(root=_fresh_root(stage.suite, f"{dockerfile.name}-{stage.name}"))
        for keyword, arguments in stage.steps:
            _run_step(image, images, keyword, _replaced(arguments, replaced or {}))
        images[stage.name] = image
    return images["final"]


def remove(dockerfile: Path) -> None:
    for stage in stages(dockerfile):
        shutil.rmtree(WORKSHOP / f"{dockerfile.name}-{stage.name}", ignore_errors=True)


def context() -> list[Path]:
    """The files that .dockerignore lets through, relative to the repository's root."""
    patterns = [
        line.strip()
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    tops = {pattern[1:].split("/")[0] for pattern in patterns if pattern.startswith("!")}
    return [
        path.relative_to(ROOT)
        for top in sorted(tops)
        for path in ([ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*"))
        if path.is_file() and _passes(path.relative_to(ROOT), patterns)
    ]


class Container:
    """An image that runs: as its user, alone on its network, with a read-only root."""

    def __init__(self, image: Image, volume: Path, *arguments: str) -> None:
        self.image = image
        root = shlex.quote(str(image.root))
        mounts = (
            "ip link set lo up",
            f"mount --bind {root} {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount --rbind /sys {root}/sys",
            f"mount -t tmpfs -o noexec,nosuid,nodev tmpfs {root}/tmp",  # as Docker does
            f"mount --bind {shlex.quote(str(volume))} {root}/cache",
            f"mount -o remount,bind,ro {root}",
            f"exec chroot --userspec={image.user} {root} "
            + shlex.join([*self._env(), *image.entrypoint, *arguments]),
        )
        self.process = subprocess.Popen(
            [*_NEW_NAMESPACES, "--net", "sh", "-ec", "\n".join(mounts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """As `docker exec` does."""
        uid, gid = self.image.user.split(":")
        enter = ["nsenter", f"--target={self.pid()}", "--mount", "--pid", "--net", "--root", "--wd"]
        return subprocess.Popen(
            [*enter, f"--setuid={uid}", f"--setgid={gid}", *self._env(), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def execute(self, *command: str, timeout_s: float = 30.0) -> "subprocess.CompletedProcess[str]":
        process = self.start(*command)
        output, errors = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def pid(self) -> int:
        """Of the process that is number 1 inside, once it is inside: as its user, in its root."""
        uid = int(self.image.user.split(":")[0])
        wait_until(lambda: [p for p in self._children() if Path(f"/proc/{p}").stat().st_uid == uid])
        return self._children()[0]

    def kill(self) -> None:
        for pid in self._children():
            os.kill(pid, signal.SIGKILL)  # and with it all inside
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        os.kill(self.pid(), signal.SIGTERM)

    def _children(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    def _env(self) -> list[str]:
        pairs = {"HOME": "/cache", **self.image.env}
        return ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in pairs.items())]


@contextlib.contextmanager
def running(image: Image, volume: Path, *arguments: str) -> Iterator[Container]:
    volume.mkdir(parents=True, exist_ok=True)
    uid, gid = (int(part) for part in image.user.split(":"))
    os.chown(volume, uid, gid)
    container = Container(image, volume, *arguments)
    try:
        yield container
    finally:
        container.kill()


_NEW_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            keyword, _, arguments = line.strip().partition(" ")
            yield keyword, arguments.strip()


def _replaced(arguments: str, replacements: dict[str, str]) -> str:
    return next((new for old, new in replacements.items() if old in arguments), arguments)


def _fresh_root(suite: str, name: str) -> Path:
    archive = WORKSHOP / f"debian-{suite}.tar"
    if not archive.exists():
        _debootstrap(suite, archive)
    root = WORKSHOP / name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    subprocess.run(["tar", "-C", root, "-xf", archive], check=True)
    shutil.copyfile("/etc/resolv.conf", root / "etc" / "resolv.conf")
    return root


def _debootstrap(suite: str, archive: Path) -> None:
    root = WORKSHOP / f"debian-{suite}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    subprocess.run(["debootstrap", "--variant=minbase", suite, root], check=True)
    with tarfile.open(archive.with_suffix(".part"), "w") as tar:
        tar.add(root, ".")
    archive.with_suffix(".part").rename(archive)
    shutil.rmtree(root)


def _run_step(image: Image, images: dict[str, Image], keyword: str, arguments: str) -> None:
    if keyword == "RUN":
        _run(image, arguments)
    elif keyword == "COPY":
        _copy(image, images, shlex.split(arguments))
    elif keyword in ("ENV", "ARG"):
        words = (word.partition("=") for word in shlex.split(arguments))
        image.env |= {name: string.Template(v).safe_substitute(image.env) for name, _, v in words}
    elif keyword == "WORKDIR":
        image.workdir = arguments
        (image.root / arguments.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif keyword == "USER":
        image.user = arguments
    elif keyword == "ENTRYPOINT":
        image.entrypoint = json.loads(arguments)
    elif keyword == "HEALTHCHECK":
        image.healthcheck = json.loads(arguments.partition("CMD ")[2])
    else:
        assert keyword in _DESCRIPTIVE, f"{keyword} is not executed here: teach tests/ops/image.py"


def _run(image: Image, command: str) -> None:
    pip_env, pip_dirs = _pip_settings(image.root)
    root = shlex.quote(str(image.root))
    script = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    for directory in pip_dirs:
        inside = f"{root}{shlex.quote(directory)}"
        script += [f"mkdir -p {inside}", f"mount --bind {shlex.quote(directory)} {inside}"]
    default = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",
    }
    env = [f"{name}={value}" for name, value in {**default, **pip_env, **image.env}.items()]
    inside = f"cd {shlex.quote(image.workdir)} && {command}"
    script.append(
        f"exec chroot {root} " + shlex.join(["/usr/bin/env", "-i", *env, "sh", "-c", inside])
    )
    done = subprocess.run(
        [*_NEW_NAMESPACES, "sh", "-ec", "\n".join(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"RUN {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def _pip_settings(root: Path) -> tuple[dict[str, str], list[str]]:
    """This machine's settings of pip as variables, and the directories that they name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    env = {}
    for name, value in re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE):
        env["PIP_" + name.upper().replace("-", "_")] = value
    if certificates := env.get("PIP_CERT"):
        shutil.copyfile(certificates, root / "run" / "certificates.pem")
        env["PIP_CERT"] = "/run/certificates.pem"
    paths = re.findall(r"(?:^|\s|file://)(/\S+)", " ".join(env.values()))
    # An index's pages, PATH/simple, name files beside them.
    return env, [path.removesuffix("/simple") for path in paths if Path(path).is_dir()]


def _copy(image: Image, images: dict[str, Image], words: list[str]) -> None:
    *sources, target = words
    if sources[0].startswith("--from="):
        other = images[sources.pop(0).removeprefix("--from=")].root
        destination = image.root / target.lstrip("/")
        destination.mkdir(parents=True, exist_ok=True)
        from_dir = f"{other}{sources[0]}/."
        subprocess.run(["cp", "--archive", "--link", from_dir, str(destination)], check=True)
        return
    base = image.root / image.workdir.lstrip("/") if not target.startswith("/") else image.root
    for source in sources:
        for path in context():
            if source == "." or path == Path(source):
                inside = path if source == "." else Path(path.name)
                destination = base / target.lstrip("/") / inside
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, destination)


def _passes(path: Path, patterns: list[str]) -> bool:
    """The last pattern that fits the path or a directory above it decides."""
    names = [str(path), *(str(parent) for parent in path.parents)]
    passes = True
    for pattern in patterns:
        wanted = pattern.lstrip("!")
        fits = [wanted, wanted.removeprefix("**/"), wanted.replace("**/", "*/")]
        if any(fnmatch.fnmatchcase(name, fit) for name in names for fit in fits):
            passes = pattern.startswith("!")
    return passes

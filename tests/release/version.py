"""The version is written in pyproject.toml; this checks and writes the other places that need it.

python -m tests.release.version            names the places that differ
python -m tests.release.version --write    writes pyproject.toml's version into them
"""

import re
import sys
import tomllib

from tests.support.paths import ROOT

_NUMBER = r"\d+\.\d+\.\d+(?:(?:a|b|rc|\.dev|\.post)\d+)*"
_TAGS = rf"\bpenstock:({_NUMBER})(?:-cpu)?\b"
# A file, and what is around each version in it.
PLACES = {
    "docker/Dockerfile": (rf'^ARG VERSION="({_NUMBER})"$', _TAGS),
    "docker/Dockerfile.cpu": (rf'^ARG VERSION="({_NUMBER})"$', _TAGS),
    "docker/compose.yaml": (_TAGS,),
    "docker/helm/penstock/Chart.yaml": (
        rf"^version: ({_NUMBER})$",
        rf'^appVersion: "({_NUMBER})"$',
    ),
    "docker/k8s/cpu/kustomization.yaml": (rf'^ +newTag: "({_NUMBER})-cpu"$',),
    "docker/k8s/gpu/kustomization.yaml": (rf'^ +newTag: "({_NUMBER})"$',),
    "docs/docker-and-kubernetes.md": (_TAGS,),
}


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def differing() -> list[str]:
    """The places with another version, or with none where one is expected."""
    found = []
    for name, patterns in PLACES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for pattern in patterns:
            versions = re.findall(pattern, text, re.MULTILINE)
            if not versions:
                found.append(f"{name} has no version like {pattern}")
            found += [f"{name} has {each}" for each in versions if each != version()]
    return found


def write() -> None:
    for name, patterns in PLACES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for pattern in patterns:
            text = re.sub(pattern, _with_version, text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")


def _with_version(found: "re.Match[str]") -> str:
    start, end = found.start(1) - found.start(), found.end(1) - found.start()
    return found[0][:start] + version() + found[0][end:]


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        write()
    for place in (places := differing()):
        print(f"{place}; pyproject.toml has {version()}", file=sys.stderr)
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

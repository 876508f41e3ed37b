"""Which build of Penstock runs: its version, and its commit where that is known without git."""

import json
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_UNKNOWN = "unknown"


@cache
def version() -> str:
    """The installed distribution's version, or "0+unknown" in a checkout that is not installed."""
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "0+unknown"


@cache
def build_info() -> dict[str, str]:
    """The labels of `penstock_build_info`."""
    return {
        "version": version(),
        "commit": _installed_commit() or checkout_commit(_ROOT) or _UNKNOWN,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def _installed_commit() -> str | None:
    """The commit that pip recorded when it installed from a repository (PEP 610)."""
    try:
        text = metadata.distribution("penstock").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    commit = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def checkout_commit(root: Path) -> str | None:
    """The commit that HEAD of a checkout points to, directly or through a loose or packed branch;
    None where `root` is not a checkout."""
    try:
        git = root / ".git"
        head = (git / "HEAD").read_text().strip()
        name = head.removeprefix("ref: ")
        if name == head:
            return head
        if (loose := git / name).is_file():
            return loose.read_text().strip()
        packed = (line.split() for line in (git / "packed-refs").read_text().splitlines())
        return next((commit for commit, *names in packed if names == [name]), None)
    except OSError:
        return None

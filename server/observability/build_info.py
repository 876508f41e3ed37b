"""Which build runs: the version, and the commit where it can be known without running git."""

import json
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

from penstock.server.observability.version import version

_ROOT = Path(__file__).parents[3]
_UNKNOWN = "unknown"


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
    """What pip noted when it installed from a repository (PEP 610)."""
    try:
        text = metadata.distribution("penstock").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    commit = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def checkout_commit(root: Path) -> str | None:
    """Of a checkout: HEAD, and the branch that it names, loose or packed."""
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

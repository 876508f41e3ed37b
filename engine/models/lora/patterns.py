"""An adapter's regular expressions, matched in a process of its own with little time and memory.

Twenty characters are enough to keep Python's `re`, for which PEFT means them, busy for days, and no
other thread of a process runs meanwhile. Run as a script, so it imports nothing but Python.
"""

import json
import re
import resource
import subprocess
import sys

_MAX_CPU_S = 2
_MAX_MEMORY_BYTES = 256 << 20

# By name: the number of the first pattern that matches it, and the text of that one's last group.
Matches = dict[str, tuple[int, str | None]]


def match(method: str, patterns: list[str], names: list[str]) -> Matches:
    """method: of re.Pattern. Blocks until the process has ended. Raises ValueError, whose words are
    to stand after the name of the field that has the patterns."""
    if not patterns:
        return {}
    command = [sys.executable, "-I", "-S", __file__]
    task = json.dumps([method, patterns, names])
    done = subprocess.run(command, input=task, capture_output=True, text=True, check=False)
    if done.returncode:
        limits = f"{_MAX_CPU_S} s or {_MAX_MEMORY_BYTES >> 20} MiB"
        raise ValueError(f"takes more than {limits} to match")
    found: Matches | str = json.loads(done.stdout)
    if isinstance(found, str):
        raise ValueError(f"has what is no regular expression: {found[:200]}")
    return found


def _match_here(method: str, patterns: list[str], names: list[str]) -> Matches | str:
    try:
        compiled = [re.compile(each) for each in patterns]
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    found: Matches = {}
    for name in names:
        tried = ((i, getattr(each, method)(name)) for i, each in enumerate(compiled))
        found |= next(({name: (i, hit[hit.re.groups])} for i, hit in tried if hit), {})
    return found


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    json.dump(_match_here(*json.load(sys.stdin)), sys.stdout)

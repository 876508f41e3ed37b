"""A chat template rendered in a process of its own: one that came with a request, or the model's
own where it takes too long.

Jinja's sandbox keeps a template from the server's objects, not from its time and memory: one line
can count to a billion, or make a number that Python computes for hours without letting another
thread run. So the process gets both in small measure, and ends. It costs some 100 ms a request.
"""

import contextlib
import json
import resource
import subprocess
import sys
from typing import Any

import msgspec

from penstock.server.config import bare_environment
from penstock.server.prompt.timed_template import RENDER_ERRORS, environment

MAX_TEMPLATE_CHARS = 1 << 16
MAX_CPU_S = 1
MAX_WALL_S = 8.0  # where the machine has much else to do
MAX_MEMORY_BYTES = 512 << 20
MAX_TEXT_CHARS = 1 << 24


class TemplateFailed(Exception):
    """The template is not valid, refuses its variables, or asks for too much; in a sentence. Its
    cause is a TypeError if that is what the template has raised."""


class TemplateTooCostly(TemplateFailed):
    """It asks for too much."""


def render(source: str, variables: dict[str, Any], *, max_cpu_s: int = MAX_CPU_S) -> str:
    """Raises TemplateFailed. Blocks until the process has ended."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateFailed(f"it has more than {MAX_TEMPLATE_CHARS} characters")
    module = "penstock.server.prompt.sandboxed_template"
    command = [sys.executable, "-P", "-m", module, str(max_cpu_s)]
    try:
        done = subprocess.run(
            command,
            input=_encoded({"source": source, "variables": variables}),
            capture_output=True,
            timeout=MAX_WALL_S,
            env=bare_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateTooCostly(f"it needs more than {MAX_WALL_S:.0f} s") from error
    if done.returncode:
        limits = f"{max_cpu_s} s or {MAX_MEMORY_BYTES >> 20} MiB"
        raise TemplateTooCostly(f"it needs more than {limits}, or is nested too deeply")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise TemplateFailed(answer["error"]) from (TypeError() if answer["is_type"] else None)
    text: str = answer["text"]
    return text


def _encoded(task: dict[str, Any]) -> bytes:
    """No other thread runs meanwhile: 30 ms of 32 MB, where Python's own encoder takes 160."""
    try:
        return msgspec.json.encode(task)
    except UnicodeEncodeError:  # half a pair of surrogates
        return json.dumps(task).encode()


def _render_here(task: dict[str, Any]) -> dict[str, str | bool]:
    try:
        text = environment().from_string(task["source"]).render(**task["variables"])
    except (*RENDER_ERRORS, SyntaxError) as error:
        return {"error": f"{error}"[:500], "is_type": isinstance(error, TypeError)}
    if len(text) > MAX_TEXT_CHARS:
        return {"error": f"it makes more than {MAX_TEXT_CHARS} characters", "is_type": False}
    return {"text": text}


def _main(max_cpu_s: int) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, max_cpu_s),
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    try:
        answer = json.dumps(_render_here(json.load(sys.stdin)))
    except MemoryError:
        sys.exit(1)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(answer)


if __name__ == "__main__":
    _main(int(sys.argv[1]))

"""The process that compiles grammars for the server, each in a child with limits.

On stdin: four bytes of length, and a grammar. On stdout: a line of JSON for each, with `bytes` (the
memory of the compiled grammar), `error`, or `killed`, if something else ended the child.

The tokenizer is loaded once, before the first fork, so a grammar that ends its child costs a fork
and no more, and each grammar has the same memory to begin with.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from penstock.engine.client import (
    BadGrammar,
    GrammarCompiler,
    LoadFormat,
    load_grammar_compiler,
)

# The costliest grammars that are of use take half a second.
MAX_CPU_S = 1.5
MAX_MEMORY_BYTES = 256 << 20  # while it is compiled
MAX_COMPILED_BYTES = 64 << 20  # afterwards
# Less than the engine's threads have: what overflows no stack here overflows none there.
_STACK_BYTES = 2 << 20

_TOO_LARGE = "it is too large or too complex; simplify it"
_TOO_SLOW = f"it takes more than {MAX_CPU_S:g} s to compile; simplify it"


def _serve(compiler: GrammarCompiler) -> None:
    with contextlib.suppress(BadGrammar):  # then each grammar gets the same error
        compiler.compile('start: "a"')  # loads the tokenizer
    gc.freeze()
    _write(sys.stdout.fileno(), {"ready": True})
    while header := sys.stdin.buffer.read(4):
        text = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        # Half a pair of surrogates is the grammar's own error.
        grammar = text.decode(errors="surrogatepass")
        _write(sys.stdout.fileno(), _compiled_in_child(compiler, grammar))


def _compiled_in_child(compiler: GrammarCompiler, grammar: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _be_child(compiler, grammar, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        reply: dict[str, Any] = json.loads(text)
        return reply
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"killed": True}  # by the kernel, for the memory of all, or by a person
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return {"error": _TOO_SLOW if is_late else _TOO_LARGE}


def _be_child(compiler: GrammarCompiler, grammar: str, writing: int) -> NoReturn:
    """A thread compiles, because only threads have a stack of a size we choose."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # Rust reports its panics
        num_bytes = _num_mapped_bytes() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # RLIMIT_CPU counts whole seconds only
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_compile, args=(compiler, grammar, writing))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _compile(compiler: GrammarCompiler, grammar: str, writing: int) -> None:
    before = _num_allocated_bytes()
    try:
        matcher = compiler.compile(grammar)
        num_bytes = max(_num_allocated_bytes() - before, 0)
        del matcher
    except BadGrammar as error:
        _write(writing, {"error": str(error)})
        return
    is_large = num_bytes > MAX_COMPILED_BYTES
    _write(writing, {"error": _TOO_LARGE} if is_large else {"bytes": num_bytes})


def _write(file: int, reply: dict[str, Any]) -> None:
    os.write(file, json.dumps(reply).encode() + b"\n")


def _num_mapped_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(pages[0]) * resource.getpagesize()


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped"),
            *("usmblks", "fsmblks", "used", "fordblks", "keepcost"),
        )
    ]


def _num_allocated_bytes() -> int:
    """By the allocator's own books: what is free again after a peak does not count. Without glibc,
    the peak."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    return int(info.used + info.mapped)


if __name__ == "__main__":
    model = json.loads(sys.argv[1])
    _serve(
        load_grammar_compiler(
            Path(model["directory"]),
            model["vocab_size"],
            tuple(model["eos_token_ids"]),
            LoadFormat(model["load_format"]),
        )
    )

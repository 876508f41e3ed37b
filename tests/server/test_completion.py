"""What Tab completes, in real shells."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from penstock.server.command_line.cli import main
from tests.support.terminal import Terminal

_BIN = Path(sys.executable).parent
# A prompt that no output contains, and nothing of the machine's own settings.
_SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'PS1="READY""$ "\n'),
    "zsh": (["zsh", "-f", "-i"], 'PS1="READY""$ "; autoload -U compinit; compinit -u -D\n'),
    "fish": (["fish", "--no-config", "-i"], "function fish_prompt; echo -n READY'$ '; end\n"),
}
_LOAD = {
    "bash": 'eval "$(penstock completion bash)"\n',
    "zsh": 'eval "$(penstock completion zsh)"\n',
    "fish": "penstock completion fish | source\n",
}


class Shell(Terminal):
    """An interactive one, in which the completion of penstock is loaded."""

    def __init__(self, name: str, home: Path) -> None:
        command, prompt = _SHELLS[name]
        path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
        super().__init__(command, {"PATH": path, "HOME": str(home), "TERM": "xterm"})
        self.resize(50, 120)
        self.press(prompt.encode())
        self.wait_for(r"READY\$ ")
        self.press(_LOAD[name].encode())
        self.press(b"echo loa''ded\n")
        self.wait_for("loaded")

    def typed(self, text: str, words: str) -> None:
        """Types that, with \\t for a Tab, and waits for what then appears."""
        self.press(b"\x15")  # discards the line
        self.read(0.2)
        self.output = ""
        for key in text:
            self.press(key.encode())
            if key == "\t":
                self.read(0.2)
        self.wait_for(words)


@pytest.fixture(params=_SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed: apt-get install {request.param}")
    return str(request.param)


def test_commands_flags_and_choices_are_completed(shell: str, tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with Shell(shell, tmp_path) as terminal:
        terminal.typed("penstock ser\t", "penstock serve ")
        terminal.typed("penstock serve --dev\t", "serve --device ")
        terminal.typed("penstock serve --device cu\t", "--device cuda ")
        terminal.typed("penstock bench --sweep-g\t", "--sweep-goodput-ratio ")
        terminal.typed("penstock top --on\t", "top --once ")
        terminal.typed("penstock chat --temp\t", "chat --temperature ")
        terminal.typed("penstock health --ssl-c\t", "health --ssl-certfile ")
        terminal.typed("penstock completion fi\t", "completion fish ")
        terminal.typed(f"penstock serve {tmp_path}/my\t", f"{tmp_path}/my-model")


@pytest.mark.parametrize("name", _SHELLS)
def test_a_script_is_printed_for_each_shell(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", name]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "bench", "top", "chat", "completion", "kv-cache-memory-bytes"):
        assert word in script


def test_another_shell_is_refused_with_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "csh"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err

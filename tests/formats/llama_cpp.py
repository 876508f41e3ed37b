"""llama.cpp as `make peers` installs it: its files of a model, and its server."""

import contextlib
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from tests.bench.peers.models import convert_to_gguf, quantize_gguf
from tests.support.paths import ROOT
from tests.support.serving import free_port

HOME = ROOT / "build" / "peers" / "llama"
IS_INSTALLED = (HOME / "installed").exists()
NOT_INSTALLED = "llama.cpp is not installed: make test-llama"
_START_TIMEOUT_S = 120.0
_CONTEXT = 512


def write_gguf(model: Path, kind: str, folder: Path) -> Path:
    """kind: of the weights, as llama.cpp names it."""
    whole = folder / "F16.gguf"
    if not whole.exists():
        convert_to_gguf(model, whole, "f16", HOME)
    file = folder / f"{kind}.gguf"
    if not file.exists():
        quantize_gguf(whole, file, kind, HOME)
    return file


class LlamaServer:
    """A `llama-server` process of one thread and one sequence, and requests to it."""

    def __init__(self, model: Path) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        flags = ("-t", "1", "-np", "1", "-c", str(_CONTEXT), "--port", str(port))
        self._process = subprocess.Popen(
            [HOME / "build" / "bin" / "llama-server", "-m", model, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self._url}/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"llama-server is not ready; exit code {self._process.poll()}")

    def token_ids(self, text: str) -> list[int]:
        """With what the model puts before a prompt."""
        ids: list[int] = self._post("/tokenize", content=text, add_special=True)["tokens"]
        return ids

    def continuation(
        self, prompt: list[int], max_tokens: int, num_top: int, *, banned: Iterable[int] = ()
    ) -> tuple[list[int], list[dict[int, float]]]:
        """The likeliest ids one after the other, and before each the logprobs of the likeliest.

        banned: ids that do not occur in the answer, and whose logprobs are as they are. The server
        leaves out the logprobs of a token whose text ends within a character (`process_token` in
        tools/server/server-context.cpp).
        """
        answer = self._post(
            "/completion",
            prompt=prompt,
            n_predict=max_tokens,
            temperature=0,
            n_probs=num_top,
            logit_bias=[[token_id, False] for token_id in banned],
            return_tokens=True,
        )
        steps = answer["completion_probabilities"]
        ids: list[int] = [step["id"] for step in steps]
        assert ids == answer["tokens"], "some tokens of the answer have no logprobs"
        tops = [{top["id"]: top["logprob"] for top in step["top_logprobs"]} for step in steps]
        return ids, tops

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _post(self, path: str, **body: Any) -> Any:
        response = httpx.post(self._url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

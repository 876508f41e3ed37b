"""The headers of GGUF files on the hub, so that a model is checked before it is downloaded."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from penstock.engine.files.gguf.header import Header, HeaderIncomplete, parse_header
from penstock.engine.hub.gguf_check import check_gguf
from penstock.engine.models.errors import InvalidModel

_FIRST_BYTES = 2**20
# That of a model with a vocabulary of 250,000 takes 15 MiB.
_MAX_BYTES = 2**28


def check_remote(repository: str, commit: str, sizes: dict[str, int]) -> None:
    """Raises InvalidModel unless the model in these files can be served, and errors of the hub's
    client. sizes: of each part, in bytes."""
    with tempfile.TemporaryDirectory(prefix="penstock-gguf-") as directory:
        paths = [Path(directory) / Path(name).name for name in sizes]
        for path, (name, size) in zip(paths, sizes.items(), strict=True):
            with path.open("wb") as file:
                file.write(_header(hf_hub_url(repository, name, revision=commit), name, size))
                file.truncate(size)  # a hole where its weights are
        try:
            check_gguf(paths[0])
        except InvalidModel as error:
            message = str(error).replace(f"{directory}/", f"{repository}/")
            raise InvalidModel(message, error.brief) from None


def _header(url: str, name: str, size: int) -> bytes:
    content, wanted = bytearray(), _FIRST_BYTES
    with _chunks(url) as chunks:
        for chunk in chunks:
            content += chunk
            if len(content) < min(wanted, size):
                continue
            try:
                header = parse_header(name, memoryview(bytes(content)), size)
                if len(content) >= _end_of_settings(header):
                    return bytes(content)
            except HeaderIncomplete:
                if len(content) >= min(size, _MAX_BYTES):
                    raise
            wanted = 4 * len(content)
    return bytes(content)


def _end_of_settings(header: Header) -> int:
    """Where the tensors end that are read with the metadata."""
    factors = header.tensors.get("rope_freqs.weight")
    return factors.offset + factors.num_bytes if factors else 0


@contextmanager
def _chunks(url: str) -> Iterator[Iterator[bytes]]:
    """A file's content as it comes; the rest of it is not sent."""
    headers = build_hf_headers()
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        yield answer.iter_bytes()

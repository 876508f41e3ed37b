"""One file of the hub into its cache, continued where an earlier download of it was interrupted;
the headers of a GGUF file there, by which it is checked before; and what its errors mean.

huggingface_hub continues after a lost connection, but not in the next process: its newer versions
delete what they have of a file, or leave it behind if they are killed. A model's file is often many
gigabytes, so it is fetched here, into the cache of huggingface_hub and under its locks:
`blobs/ETAG.incomplete` becomes `blobs/ETAG`, which huggingface_hub then links.
"""

import errno
import hashlib
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status

from penstock.engine.files.gguf.header import Header, HeaderIncomplete, parse_header
from penstock.engine.files.gguf.rope import ROPE_TENSORS
from penstock.engine.hub.gguf import check_gguf
from penstock.engine.hub.model_files import DownloadProgress
from penstock.engine.models.errors import InvalidModel

logger = logging.getLogger(__name__)

# Failed attempts in a row, none of which got a byte.
_MAX_ATTEMPTS = 5
_PAUSE_S = 1.0
_SHA256_CHARS = 64


def storage_folder(repo: str) -> Path:
    """Where the cache has a repository."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def is_cached(repo: str, commit: str, name: str) -> bool:
    return (storage_folder(repo) / "snapshots" / commit / name).exists()


def partial_bytes(repo: str, etag: str) -> int:
    """Those that an interrupted download has left of a file, and `fetch` continues."""
    try:
        return (storage_folder(repo) / "blobs" / f"{etag}.incomplete").stat().st_size
    except OSError:
        return 0


def fetch(repo: str, commit: str, name: str, progress: DownloadProgress) -> None:
    """Raises DownloadStopped, errors of huggingface_hub and of its transport, and OSError."""
    metadata = get_hf_file_metadata(hf_hub_url(repo, name, revision=commit))
    etag, size = metadata.etag, metadata.size
    if not etag or size is None or size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        # Beyond what is served by plain HTTP; by Xet, whose parts cannot be continued.
        hf_hub_download(repo, name, revision=commit)
        progress.add(size or 0)
        return
    folder = storage_folder(repo)
    blob = folder / "blobs" / etag
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / folder.name / f"{etag}.lock"
    for directory in (blob.parent, lock.parent):
        directory.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            progress.add(size, is_new=False)
        else:
            _Part(hf_hub_url(repo, name, revision=commit), name, blob, size, progress).complete()
    hf_hub_download(repo, name, revision=commit)  # downloads nothing: it makes the link


class _Part:
    """A blob that is not complete yet."""

    def __init__(
        self, url: str, name: str, blob: Path, size: int, progress: DownloadProgress
    ) -> None:
        self._url = url
        self._name = name
        self._blob = blob
        self._path = blob.with_name(f"{blob.name}.incomplete")
        self._size = size
        self._progress = progress

    def complete(self) -> None:
        found = self._num_bytes()
        if found > self._size:
            self._path.unlink()
            found = 0
        self._progress.add(found, is_new=False)
        self._fetch_rest()
        if found and not self._is_intact():
            logger.warning("%s was damaged, and is downloaded again", self._name)
            self._path.unlink()
            self._progress.add(-self._size)
            self._fetch_rest()
        self._path.replace(self._blob)

    def _fetch_rest(self) -> None:
        attempts = 0
        while True:
            before = self._num_bytes()
            try:
                with self._path.open("ab") as file:
                    http_get(
                        self._url,
                        file,
                        resume_size=before,
                        headers=build_hf_headers(),
                        expected_size=self._size,
                        displayed_filename=self._name,
                        tqdm_class=self._bar_class(before),
                    )
                return
            except Exception as error:
                attempts = 0 if self._num_bytes() > before else attempts + 1
                if not is_of_transport(error) or attempts == _MAX_ATTEMPTS:
                    raise
                logger.warning("%s: %s; the download is continued", self._name, error)
            time.sleep(_PAUSE_S)

    def _bar_class(self, before: int) -> Any:
        """Counts for `http_get`, which takes it for the class of a tqdm bar."""
        progress = self._progress

        class Bar:
            def __init__(self, *, initial: int = 0, **_: object) -> None:
                if initial < before:  # the server sends the file from its beginning
                    progress.add(initial - before)

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, num_bytes: int) -> None:
                progress.add(num_bytes)

        return Bar

    def _num_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _is_intact(self) -> bool:
        """Where locks do not work, another process may have written to the same part. The etag of a
        large file is its SHA-256."""
        if len(self._blob.name) != _SHA256_CHARS:
            return True
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self._blob.name


def is_of_transport(error: BaseException) -> bool:
    """Whether the connection failed. huggingface_hub's transport changes with its version."""
    return any(
        kind.__module__.partition(".")[0] in ("httpx", "httpx2") for kind in type(error).__mro__
    ) and not isinstance(error, OSError)


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
    factors = (header.tensors.get(name) for name in ROPE_TENSORS)
    return max((each.offset + each.num_bytes for each in factors if each), default=0)


@contextmanager
def _chunks(url: str) -> Iterator[Iterator[bytes]]:
    """A file's content as it comes; the rest of it is not sent."""
    headers = build_hf_headers()
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        yield answer.iter_bytes()


_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def explain(model: str, error: BaseException) -> InvalidModel:
    """One sentence on why the hub did not give it, and what to change."""
    hub = constants.ENDPOINT
    causes = _chain(error)
    http = next((each for each in causes if isinstance(each, HfHubHTTPError)), None)
    if any(isinstance(each, OfflineModeIsEnabled) for each in causes):
        text = (
            f"there is no directory {model!r}, HF_HUB_OFFLINE is set, and no complete download of "
            f"it is in {constants.HF_HUB_CACHE}; unset HF_HUB_OFFLINE, or name a directory"
        )
    elif isinstance(http, GatedRepoError):
        text = (
            f"{model} is gated: accept its terms on {hub}/{model}, and set HF_TOKEN to a token of "
            "the account that did"
        )
    elif isinstance(http, RepositoryNotFoundError):
        hint = (
            "the token that is set (HF_TOKEN or `hf auth login`) may not read it"
            if get_token()
            else "set HF_TOKEN if it is private"
        )
        text = (
            f"there is no directory {model!r}, and {hub} has no model of that name; check the "
            f"spelling, or {hint}"
        )
    elif http is not None and not isinstance(http, EntryNotFoundError):
        status = http.response.status_code
        text = f"{model} could not be downloaded: {hub} answered with status {status}; "
        text += "check HF_TOKEN" if status in (401, 403) else "try again later"
    elif any(is_of_transport(each) for each in causes):
        text = (
            f"{model} could not be downloaded, because {hub} could not be reached "
            f"({_first_line(causes[-1])}); check the network, or name a directory; what is there "
            "already is kept, and the next start continues"
        )
    else:
        text = _explain_system(model, error)
    return InvalidModel(text)


def _explain_system(model: str, error: BaseException) -> str:
    code, cache = getattr(error, "errno", None), constants.HF_HUB_CACHE
    if code in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{model} could not be downloaded, because the disk of {cache} is full; free some "
            "space, or set HF_HOME to a directory on a larger disk, and start again: it continues"
        )
    if code in _UNWRITABLE:
        return (
            f"{model} could not be downloaded, because {cache} cannot be written; set HF_HOME to "
            "a directory that can"
        )
    return f"{model} could not be downloaded ({_first_line(error)}); name a directory, or try again"


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what caused it, the first cause last."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__
    return causes


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""One file of the hub into its cache, continued where an earlier download of it was interrupted.

huggingface_hub continues after a lost connection, but not in the next process: its newer versions
delete what they have of a file, or leave it behind if they are killed. A model's file is often many
gigabytes, so it is fetched here, into the cache of huggingface_hub and under its locks:
`blobs/ETAG.incomplete` becomes `blobs/ETAG`, which huggingface_hub then links.
"""

import hashlib
import logging
import time
from pathlib import Path
from typing import Any, Self

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers

from penstock.engine.hub.progress import DownloadProgress

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

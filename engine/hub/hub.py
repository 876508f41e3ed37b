"""From a model's name to a directory or GGUF file on this machine: a path, or a model of Hugging
Face's hub.

What decides whether a model can be served comes first, then its tokenizer, then its weights, and
nothing else. Knows no tensors.
"""

import logging
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import disable_progress_bars

from penstock.engine.config import ModelImpl
from penstock.engine.files.json_file import CONFIG
from penstock.engine.files.safetensors import INDEX
from penstock.engine.hub.check import (
    GENERATION_CONFIG,
    check_model,
    holds_gguf,
    weight_files,
)
from penstock.engine.hub.download import (
    check_remote,
    explain,
    fetch,
    is_cached,
    partial_bytes,
    storage_folder,
)
from penstock.engine.hub.gguf import Reference, check_gguf, choose, parse_reference
from penstock.engine.hub.local import checked_path, open_local
from penstock.engine.hub.model_files import (
    Download,
    DownloadProgress,
    DownloadStopped,
    ModelFiles,
    size,
)
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.parse import HF_QUANT_CONFIG

logger = logging.getLogger(__name__)

_DECISIVE = (CONFIG, GENERATION_CONFIG, HF_QUANT_CONFIG, INDEX)
_SETTINGS = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    *("*_Pooling/config.json", "*_Dense/config.json", "*_LogitScore/config.json"),
    "*_Dense/model.safetensors",
)
# A tokenizer is made of these, where there is no tokenizer.json.
_SLOW_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
# Files at a time: one connection rarely fills a fast line, and each may have to be done again.
_NUM_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    etag: str


def open_model(
    model: str, *, needs_weights: bool = True, impl: ModelImpl = ModelImpl.AUTO
) -> ModelFiles:
    """Finds a local path or a hub id. Raises InvalidModel for what cannot be served. needs_weights:
    False for made-up weights. Without a network, what was downloaded earlier is used."""
    local = open_local(model, needs_weights=needs_weights, impl=impl)
    if local is not None:
        return local
    reference = parse_reference(model)
    _write_logs_as_ours()
    try:
        repository = _Repository.listed(reference.repository)
        return repository.open(reference.wanted, needs_weights, impl)
    except HFValidationError:
        raise InvalidModel(
            f"there is no directory {model!r}, and it is not a Hugging Face id either "
            "(those look like 'owner/name'); check the path"
        ) from None
    except InvalidModel:
        raise
    except Exception as error:  # the hub's client also raises errors of its transport
        earlier = _downloaded_earlier(reference, error, needs_weights=needs_weights, impl=impl)
        return ModelFiles(earlier)


class _Repository:
    """One commit of a model on the hub."""

    def __init__(self, name: str, commit: str, files: dict[str, _File]) -> None:
        self._name = name
        self._commit = commit
        self._files = files

    @classmethod
    def listed(cls, name: str) -> "_Repository":
        timeout_s = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().model_info(name, files_metadata=True, timeout=timeout_s)
        files = {
            each.rfilename: _File(each.size or 0, each.lfs.sha256 if each.lfs else "")
            for each in info.siblings or ()
        }
        return cls(name, info.sha or constants.DEFAULT_REVISION, files)

    def open(self, wanted: str | None, needs_weights: bool, impl: ModelImpl) -> ModelFiles:
        if wanted is not None or holds_gguf(self._files):
            return self._open_gguf(wanted, needs_weights)
        self._get(self._matching(_DECISIVE))
        directory = Path()
        if CONFIG in self._files:  # else the check says so, and better
            directory = Path(hf_hub_download(self._name, CONFIG, revision=self._commit)).parent
        where = f"{self._name} on {constants.ENDPOINT}"
        check_model(where, directory, self._files, needs_weights=needs_weights, impl=impl)
        weights = weight_files(where, directory, self._files) if needs_weights else []
        missing = [name for name in weights if not is_cached(self._name, self._commit, name)]
        self._check_space(missing)
        name = "tokenizer.json"
        tokenizer = (name,) if name in self._files else _SLOW_TOKENIZER
        self._get(self._matching((*_SETTINGS, *tokenizer)))
        if missing:
            return ModelFiles(directory, self._download(missing, CONFIG))
        self._finish(CONFIG)
        return ModelFiles(directory)

    def _open_gguf(self, wanted: str | None, needs_weights: bool) -> ModelFiles:
        parts = choose(self._name, self._files, wanted)
        path = storage_folder(self._name) / "snapshots" / self._commit / parts[0]
        missing = [name for name in parts if not is_cached(self._name, self._commit, name)]
        if not missing:
            check_gguf(path, needs_weights=needs_weights)
            self._finish(parts[0])
            return ModelFiles(path)
        check_remote(self._name, self._commit, {name: self._files[name].size for name in parts})
        self._check_space(missing)
        return ModelFiles(path, self._download(missing, parts[0]))

    def _matching(self, patterns: Iterable[str]) -> list[str]:
        """The files of these names; `*` does not match a slash."""
        return [
            name
            for name in self._files
            if any(
                fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
                for pattern in patterns
            )
        ]

    def _get(self, names: Iterable[str]) -> None:
        for name in names:
            hf_hub_download(self._name, name, revision=self._commit)

    def _check_space(self, missing: list[str]) -> None:
        cache = Path(constants.HF_HUB_CACHE)
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        needed = sum(
            max(0, self._files[name].size - partial_bytes(self._name, self._files[name].etag))
            for name in missing
        )
        if needed > free:
            raise InvalidModel(
                f"the weights of {self._name} take {size(needed)} more on the disk, but "
                f"{cache} has only {size(free)} free; free some, or set HF_HOME to a directory on "
                "a larger disk",
                brief="not enough disk space",
            )

    def _download(self, missing: list[str], last: str) -> Download:
        num_bytes = sum(self._files[name].size for name in missing)
        progress = DownloadProgress(num_bytes)
        num_files = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        return Download(
            what=f"{size(num_bytes)} in {num_files} to {constants.HF_HUB_CACHE}",
            state=progress.state,
            run=partial(self._fetch_weights, missing, progress, last),
        )

    def _fetch_weights(self, missing: list[str], progress: DownloadProgress, last: str) -> None:
        try:
            self._fetch_all(missing, progress)
            self._finish(last)
        except Exception as error:  # the hub's client also raises errors of its transport
            raise explain(self._name, error) from None

    def _fetch_all(self, missing: list[str], progress: DownloadProgress) -> None:
        def fetch_one(name: str) -> None:
            try:
                fetch(self._name, self._commit, name, progress)
            except BaseException:
                progress.stop()
                raise

        progress.begin()
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            futures = [pool.submit(fetch_one, name) for name in missing]
            errors = [error for future in futures if (error := future.exception())]
        # Those that were stopped are not the reason.
        for error in sorted(errors, key=lambda each: isinstance(each, DownloadStopped)):
            raise error

    def _finish(self, name: str) -> None:
        """Makes this commit the one that is used without a network. name: of one of its files."""
        hf_hub_download(self._name, name)


def _downloaded_earlier(
    reference: Reference, error: Exception, *, needs_weights: bool, impl: ModelImpl
) -> Path:
    """Returns where the cache has it; raises InvalidModel, for `error` if it has nothing."""
    model = reference.repository
    try:
        directory = Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError:
        raise explain(model, error) from None
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    try:
        path = checked_path(
            directory, model, names, reference.wanted, needs_weights=needs_weights, impl=impl
        )
    except InvalidModel as incomplete:
        raise InvalidModel(
            f"{explain(model, error)}; what was downloaded earlier cannot be served: {incomplete}"
        ) from None
    if not isinstance(error, OfflineModeIsEnabled):
        logger.warning("%s; what was downloaded earlier is served", explain(model, error))
    return path


def _write_logs_as_ours() -> None:
    """huggingface_hub has a handler of its own, which would write plain lines between ours."""
    library = logging.getLogger("huggingface_hub")
    for handler in list(library.handlers):
        library.removeHandler(handler)
    library.propagate = True
    for transport in ("httpx", "httpx2"):  # a line for each of its requests
        logging.getLogger(transport).setLevel(max(logging.root.level, logging.WARNING))
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()

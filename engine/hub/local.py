"""A model whose path is named: found and checked without the hub's client, which takes 0.3 s to
import."""

import os
from collections.abc import Collection
from pathlib import Path

from penstock.engine.config import ModelImpl
from penstock.engine.files.gguf.file import SUFFIX
from penstock.engine.hub.check import check_directory, holds_gguf, names_in
from penstock.engine.hub.gguf import check_gguf, choose, parse_reference
from penstock.engine.hub.model_files import ModelFiles
from penstock.engine.models.families.unsupported import not_a_model


def open_local(model: str, *, needs_weights: bool, impl: ModelImpl) -> ModelFiles | None:
    """Returns None for what is no path: it may be a hub id. Raises InvalidModel for a path of what
    cannot be served. needs_weights: False for made-up weights."""
    # os.path leaves the ~ of an unknown user as it is, for which pathlib raises.
    local = Path(os.path.expanduser(model))  # noqa: PTH111
    if local.is_dir():
        names = names_in(local)
        return ModelFiles(
            checked_path(local, str(local), names, None, needs_weights=needs_weights, impl=impl)
        )
    is_suffixed = model.endswith(SUFFIX)
    is_file = os.path.lexists(local) or (is_suffixed and not parse_reference(model).wanted)
    if not is_file:
        return None
    if not is_suffixed:
        raise not_a_model(model)
    check_gguf(local, needs_weights=needs_weights)
    return ModelFiles(local)


def checked_path(
    directory: Path,
    model: str,
    names: Collection[str],
    wanted: str | None,
    *,
    needs_weights: bool,
    impl: ModelImpl,
) -> Path:
    """Returns the directory, or the GGUF file in it that is served. Raises InvalidModel. model: its
    name for the message. names: of all files. wanted: as in `Reference`."""
    if wanted is None and not holds_gguf(names):
        check_directory(directory, needs_weights=needs_weights, impl=impl)
        return directory
    path = directory / choose(model, names, wanted)[0]
    check_gguf(path, needs_weights=needs_weights)
    return path

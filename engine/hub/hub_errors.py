"""Errors of huggingface_hub and its transport, each in a sentence that says what to change."""

import errno

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from penstock.engine.hub.download import is_of_transport
from penstock.engine.models.errors import InvalidModel

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

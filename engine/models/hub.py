"""From a model's name to a directory on this machine. Knows the hub and no tensors."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from penstock.engine.models.errors import InvalidModel

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def resolve_model(model: str) -> Path:
    """The directory of `model`: a local path, or the hub's snapshot, downloaded if incomplete.

    Without a network, a snapshot that was downloaded earlier is used.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise InvalidModel(f"the model {model!r} is a file; name the directory that holds it")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES)))
    except HFValidationError:
        raise InvalidModel(
            f"there is no directory {model!r}, and it is not a Hugging Face id either "
            "(those look like 'owner/name'); check the path"
        ) from None
    except Exception as error:  # the hub's client also raises errors of its transport
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidModel(
            f"there is no directory {model!r}, and it could not be downloaded from Hugging Face "
            f"({type(error).__name__}: {reason}); name a directory that has config.json and "
            "*.safetensors, or download the model first where there is a network"
        ) from None

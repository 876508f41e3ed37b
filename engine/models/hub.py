"""From a model's name to a directory on this machine. Knows the hub, knows nothing of tensors."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from penstock.engine.models.errors import InvalidModel

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def resolve_model(model: str) -> Path:
    """The directory of `model`: a local one as it is, else the hub's snapshot.

    Downloads what is missing. Without a network, a snapshot downloaded before still serves.
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
    except Exception as error:  # the hub's client raises its transport's errors too, by many names
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidModel(
            f"there is no directory {model!r}, and it could not be had from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); name a directory that has config.json and "
            "*.safetensors, or download the model first where there is a network"
        ) from None

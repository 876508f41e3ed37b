"""Which penstock this is."""

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed distribution's version; a checkout that is not installed has none."""
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "0+unknown"

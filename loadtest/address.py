"""The address of a server, as people type it."""

from urllib.parse import urlsplit

from penstock.scheduler.errors import InvalidConfig

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "PENSTOCK_API_KEY"


def base_url(given: str) -> str:
    """A typed address as the server's root URL: with a scheme, without /metrics or /v1.

    Raises InvalidConfig.
    """
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise InvalidConfig(
            f"{given} is not a server's address; write it like http://127.0.0.1:8000"
        )
    url = url.split("?")[0].split("#")[0].rstrip("/")
    for ending in ("/metrics", "/v1"):
        url = url.removesuffix(ending)
    return url

"""Who may use the server, and as whom: API keys, and the tenant that a key stands for."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from penstock.server.errors import InvalidApiKey

# In the scope: the tenant of the request's key, see `tenant_of`.
TENANT = "penstock.tenant"
# Asked by what runs the server, which has no key: whether it lives, and whether to send traffic.
OPEN_PATHS = frozenset({"/health", "/ready"})


class KeyCheck:
    """Compares keys in constant time. Without keys every request passes."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        # All of one length, so that a comparison reveals nothing of a key, not even its length.
        self._digests = [_digest(key.encode(errors="surrogateescape")) for key in api_keys]

    def check(self, key: str | None) -> None:
        """Raises InvalidApiKey."""
        if not self._digests:
            return
        given = _digest((key or "").encode("latin-1"))  # the bytes that were sent
        # Every one is compared, so that the time does not reveal which was right.
        if not sum(hmac.compare_digest(given, digest) for digest in self._digests):
            raise InvalidApiKey(is_given=bool(key))


def api_key_of(headers: Headers) -> str | None:
    """From OpenAI's header, `Authorization: Bearer KEY`, or from Anthropic's, `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key") or None


def tenant_of(api_key: str | None) -> str:
    """Keeps one key's cached prefixes and stored responses from another's. The key cannot be read
    from it."""
    return hashlib.sha256(api_key.encode()).hexdigest()[:32] if api_key else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

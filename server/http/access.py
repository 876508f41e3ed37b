"""Who may use the server, and as whom: API keys, and the tenant that a key stands for."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers

from penstock.server.errors import InvalidApiKey

# In the scope: the tenant that `Access` found.
TENANT = "penstock.tenant"
# Probes of an orchestrator, which has no key: is the server alive, and may it get traffic?
OPEN_PATHS = ("/health", "/ping", "/ready")


class Access:
    """Without keys every request passes."""

    def __init__(
        self, api_keys: Sequence[str], open_paths: Collection[str], open_prefix: str | None
    ) -> None:
        """open_paths, and those that begin with open_prefix, need no key."""
        # All of one length, so that a comparison reveals nothing of a key, not even its length.
        self._digests = [_digest(key.encode(errors="surrogateescape")) for key in api_keys]
        self._open_paths = frozenset(open_paths)
        self._open_prefix = open_prefix

    def tenant(self, headers: Headers, path: str) -> str:
        """Keeps one key's cached prefixes and stored responses from another's; "" without a key.
        The key cannot be read from it. Raises InvalidApiKey.
        """
        key = _key(headers)
        if self._digests and not self._is_open(path):
            given = _digest(key.encode("latin-1"))  # the bytes that were sent
            # Every one is compared, so that the time does not reveal which was right.
            if not sum(hmac.compare_digest(given, digest) for digest in self._digests):
                raise InvalidApiKey(is_given=bool(key))
        return _tenant(key)

    def _is_open(self, path: str) -> bool:
        is_asset = self._open_prefix is not None and path.startswith(self._open_prefix)
        return path in self._open_paths or is_asset


def claimed_tenant(headers: Headers) -> str:
    """As `Access.tenant`, whether the key is right or not: for the log."""
    return _tenant(_key(headers))


def _key(headers: Headers) -> str:
    """From OpenAI's header, `Authorization: Bearer KEY`, or from Anthropic's, `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "")


def _tenant(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

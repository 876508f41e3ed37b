"""Who may use the server, and as whom: API keys, the tenant that a key stands for, and web pages.

A web page can do nothing with this server through the browser of somebody who can reach it, unless
it is the server's own, or --allowed-origins names it. Browsers send some requests of any page to
any address (cross-site request forgery). And a page whose own name suddenly resolves to this
machine is taken for this server's own (DNS rebinding). A client that is no browser sends none of
the headers that are judged here, but for Host.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.server.config import ServerConfig
from penstock.server.errors import CrossSiteRequest, InvalidApiKey, UnknownHost

# In the scope: the tenant that `Access` found.
TENANT = "penstock.tenant"
# Likewise the headers that its route adds to a response, a dict by name.
RESPONSE_HEADERS = "penstock.response_headers"
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


ANY = "*"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# They change nothing, and a page cannot read the answers without the permission of CORS.
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))


class WebPages:
    """Judges the headers that a browser sends of its own accord, which no page can forge."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(config.cors.allowed_origins)
        self._hosts = _allowed_hosts(config)

    def check(self, method: str, headers: Headers) -> None:
        """Raises UnknownHost and CrossSiteRequest."""
        host = headers.get("host", "")  # no browser leaves it out
        if self._hosts is not None and host and host_name(host) not in self._hosts:
            raise UnknownHost(host)
        if method not in _SAFE_METHODS:
            self._check_origin(headers)

    def _check_origin(self, headers: Headers) -> None:
        """Where the browser says how the page and this server are related, that counts: behind a
        proxy, Host may differ from what the browser asked for. Browsers do not say it over plain
        HTTP, except to the machine itself.

        Source: `CrossOriginProtection` of Go's net/http.
        """
        origin = headers.get("origin")
        if ANY in self._origins or origin in self._origins:
            return
        relation = headers.get("sec-fetch-site")
        if relation is not None:
            is_own = relation in ("same-origin", "none")
        else:
            host = headers.get("host", "").lower()
            is_own = origin is None or urlsplit(origin).netloc.lower() == host
        if not is_own:
            raise CrossSiteRequest(origin)


def _allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """None for any: by default where other machines can connect, by whatever name they know this
    one, and an attacker's page needs no such trick."""
    names = config.allowed_hosts
    if ANY in names or not (names or _is_loopback(config.host)):
        return None
    return frozenset(map(host_name, (*_LOOPBACK_NAMES, config.host, *names)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


def host_name(host: str) -> str:
    """Returns a name or address, which may have a port, in one spelling."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    elif host.count(":") > 1:  # an IPv6 address without brackets, as a flag has it
        name = host
    else:
        name = host.partition(":")[0]
    name = name.lower().removesuffix(".")
    try:
        return ipaddress.ip_address(name).compressed
    except ValueError:
        return name

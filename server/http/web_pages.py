"""What a web page can do with this server through the browser of somebody who can reach it: nothing
unless it is the server's own, or --allowed-origins names it.

Browsers send some requests of any page to any address (cross-site request forgery). And a page
whose own name suddenly resolves to this machine is taken for this server's own (DNS rebinding). A
client that is no browser sends none of the headers that are judged here, but for Host.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from penstock.server.config import ServerConfig
from penstock.server.errors import CrossSiteRequest, UnknownHost

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
        self._check_host(headers.get("host", ""))
        if method not in _SAFE_METHODS:
            self._check_origin(headers)

    def _check_host(self, host: str) -> None:
        """No browser leaves it out."""
        if self._hosts is not None and host and host_name(host) not in self._hosts:
            raise UnknownHost(host)

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
            is_own = origin is None or urlsplit(origin).netloc.lower() == _host_of(headers)
        if not is_own:
            raise CrossSiteRequest(origin)


def _host_of(headers: Headers) -> str:
    return headers.get("host", "").lower()


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

"""Images that are named by a URL, from hosts that the operator has named.

A server that fetches what a client names is a way into the operator's network. So: https alone; the
host is one of those named, exactly; a name is resolved once, every address that it has must be
public, and one of these is connected to; no redirect is followed; and there are limits of bytes and
time. One expression reads the URL, and what it found is what is used: two parsers that disagree
about "https://a\\@b/" were a hole of vLLM's (CVE-2026-24779).
"""

import asyncio
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from penstock.server.media.decoder import BadImage

_URL = re.compile(r"https://([A-Za-z0-9.-]{1,253})(?::(\d{1,5}))?([/?][!-\[\]-~]*)?")
_NUM_THREADS = 8
TIMEOUT_S = 10.0  # of all of it: name, connection, headers and content
_READ_BYTES = 1 << 16
# Prefixes under which an address of IPv6 means one of IPv4 at a gateway (RFC 6052, 8215).
_GATEWAYS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48")))


def is_public(address: str) -> bool:
    """Whether it belongs to the internet, and to no private network, machine or link."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if any(parsed in network for network in _GATEWAYS):
            return False
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None,))[0]
        if inner is not None:
            return False  # nobody's public host has only such an address
    return parsed.is_global and not parsed.is_multicast


def _resolve(host: str, port: int) -> list[str]:
    return [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class ImageFetcher:
    """Lives on one event loop; its threads wait for hosts."""

    def __init__(
        self,
        domains: tuple[str, ...],
        max_bytes: int,
        *,
        timeout_s: float = TIMEOUT_S,
        resolve: Callable[[str, int], list[str]] = _resolve,
        is_allowed: Callable[[str], bool] = is_public,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """domains: the names of hosts, with a port where it is not 443. max_bytes: of a file."""
        self._domains = frozenset(domain.lower() for domain in domains)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._context = context
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fetch")

    async def fetch(self, url: str) -> bytes:
        """Raises BadImage, whose message tells nothing of the network."""
        found = _URL.fullmatch(url.partition("#")[0]) if len(url) < 1 << 13 else None
        if found is None:
            raise BadImage("its URL must be like https://example.com/image.png, or a data: URL")
        host, port = found[1].lower(), int(found[2] or 443)
        if (host if port == 443 else f"{host}:{port}") not in self._domains:
            raise BadImage(f"{host[:80]!r} is not among the hosts of --allowed-media-domains")
        path = found[3] or "/"
        path = path if path.startswith("/") else f"/{path}"
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._fetched, host, port, path)
        try:
            return await asyncio.wait_for(work, 2 * self._timeout_s)
        except TimeoutError:  # a resolver that hangs
            raise BadImage(f"{host!r} did not send it in time") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetched(self, host: str, port: int, path: str) -> bytes:
        end_s = time.monotonic() + self._timeout_s
        try:
            addresses = self._resolve(host, port)
            if not addresses or not all(map(self._is_allowed, addresses)):
                raise BadImage(f"{host!r} has no address, or one that is not public")
            context = self._context or ssl.create_default_context()
            address, timeout_s = (addresses[0], port), self._timeout_s
            with (
                socket.create_connection(address, timeout=timeout_s) as plain,
                context.wrap_socket(
                    plain,
                    server_hostname=host,
                    do_handshake_on_connect=False,
                    suppress_ragged_eofs=False,  # else half a file may look like all of it
                ) as tls,
            ):
                # Slow bytes would begin a socket's own timeout anew each time.
                timer = threading.Timer(max(0.0, end_s - time.monotonic()), _end, (tls,))
                timer.daemon = True
                timer.start()
                try:
                    tls.do_handshake()
                    return self._content(host, port, path, tls)
                finally:
                    timer.cancel()
        except (OSError, http.client.HTTPException, ValueError):
            if time.monotonic() >= end_s:
                raise BadImage(f"{host!r} did not send it in time") from None
            raise BadImage(f"{host!r} cannot be reached, or broke off") from None

    def _content(self, host: str, port: int, path: str, tls: ssl.SSLSocket) -> bytes:
        connection = http.client.HTTPSConnection(host, port)
        connection.sock = tls  # so that it connects to nothing itself
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "penstock"}
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as response:
                return self._body(host, response)

    def _body(self, host: str, response: http.client.HTTPResponse) -> bytes:
        if response.status != 200:
            raise BadImage(
                f"{host!r} answered with status {response.status}; redirects are not followed"
            )
        content = bytearray()
        while part := response.read1(_READ_BYTES):
            content += part
            if len(content) > self._max_bytes:
                raise BadImage(f"the file at {host!r} is larger than {self._max_bytes} bytes")
        if response.length:
            raise BadImage(f"{host!r} cannot be reached, or broke off")
        return bytes(content)


def _end(connection: socket.socket) -> None:
    """Its thread then reads no more: the socket is closed below TLS, which is that thread's."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)

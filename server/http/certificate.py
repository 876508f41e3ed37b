"""The certificate of HTTPS. Each new connection gets the one that is in the files by then."""

import logging
import ssl
from pathlib import Path

from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger("penstock")


class Certificate:
    """A file that is half written, or a certificate whose key has not come yet, leaves the one
    before in place."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """Raises InvalidConfig."""
        self._certificate, self._key = certificate, key
        self._seen = self._versions()
        try:
            self._newest = self._read()
        except (ssl.SSLError, OSError) as error:
            raise InvalidConfig(
                f"--ssl-certfile {certificate} and its key cannot be used: {error}"
            ) from error

    def watch(self, context: ssl.SSLContext) -> None:
        """context: of the listening socket."""
        context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, host: str | None, _: ssl.SSLContext) -> None:
        """In each handshake, also of a client that names no host."""
        versions = self._versions()
        if versions != self._seen:
            self._seen = versions
            try:
                self._newest = self._read()
                logger.info("--ssl-certfile %s has changed; it is in use", self._certificate)
            except (ssl.SSLError, OSError) as error:
                logger.warning(
                    "--ssl-certfile %s or its key has changed, and they cannot be used; those "
                    "before are kept: %s", self._certificate, error
                )  # fmt: skip
        connection.context = self._newest

    def _versions(self) -> list[tuple[int, int, int] | None]:
        return [_version(path) for path in (self._certificate, self._key) if path]

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Nobody is there to type a password when a certificate is renewed.
        context.load_cert_chain(self._certificate, self._key, password="")
        return context


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size

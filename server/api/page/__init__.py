"""The page at `/`: a playground and a live view, as plain files in this folder.

It uses the same routes as any client, `/v1` and `/metrics`, with the key that the user enters; so
the page itself needs none. Its headers forbid the browser to load anything from elsewhere, to run
inline scripts, and to treat text as markup that the sanitizer did not pass. `chat/` has the
playground and its conversations, `live/` the live view, `text/` Markdown and formulas, and
`vendor/` the libraries; its libraries.json says what they are and where they come from.
"""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

ASSETS_PREFIX = "/page/"

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    # Asked for again each time, so that the page is always that of the running server.
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    gzipped: bytes | None  # None if it is compressed already
    media_type: str
    etag: str


@router.get("/")
async def page(request: Request) -> Response:
    return _response(request, "index.html")


@router.get(ASSETS_PREFIX + "{name:path}")
async def asset(request: Request, name: str) -> Response:
    return _response(request, name)


def _response(request: Request, name: str) -> Response:
    """Raises HTTPException for unknown names."""
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = _HEADERS | {"etag": file.etag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if file.gzipped is None or "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.content, headers=headers, media_type=file.media_type)
    headers["content-encoding"] = "gzip"
    return Response(file.gzipped, headers=headers, media_type=file.media_type)


@cache
def _files() -> dict[str, _File]:
    """Path under the page -> every file that is served; no other path is read."""
    home = files(__package__)
    entries = {
        folder + entry.name: entry
        for folder in ("", "chat/", "live/", "text/", "vendor/", "vendor/fonts/")
        for entry in home.joinpath(folder).iterdir()
    }
    return {
        name: _file(entry.read_bytes(), media_type)
        for name, entry in entries.items()
        if entry.is_file() and (media_type := _MEDIA_TYPES.get(name.rpartition(".")[2]))
    }


def _file(content: bytes, media_type: str) -> _File:
    # A weak tag, since it stands for the content with and without compression.
    etag = f'W/"{hashlib.sha256(content).hexdigest()[:16]}"'
    gzipped = None if media_type.startswith("font/") else gzip.compress(content, mtime=0)
    return _File(content, gzipped, media_type, etag)

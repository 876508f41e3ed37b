"""The page at `/`: a playground and a live view, as plain files in this folder.

It uses the same routes as any client, `/v1` and `/metrics`, with the key that the user enters; so
the page itself needs none. Its headers forbid the browser to load anything from elsewhere, to run
inline scripts, and to treat text as markup.
"""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

ASSETS_PREFIX = "/page/"

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "cache-control": "no-cache",  # so that the page is always that of the running server
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    return _file("index.html")


@router.get(ASSETS_PREFIX + "{name}")
async def asset(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    """Raises HTTPException for unknown names."""
    content = _contents().get(name)
    if content is None:
        raise HTTPException(404)
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, headers=_HEADERS, media_type=media_type)


@cache
def _contents() -> dict[str, bytes]:
    """Name -> content of every file that is served; no other path is read."""
    names = (entry for entry in files(__package__).iterdir() if entry.is_file())
    return {
        entry.name: entry.read_bytes()
        for entry in names
        if entry.name.rpartition(".")[2] in _MEDIA_TYPES
    }

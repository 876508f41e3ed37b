"""`/docs` (Swagger UI) and `/redoc` (ReDoc): the OpenAPI schema, shown without any other server.

Their scripts come with the package fastapi-offline. The pages' headers forbid the browser to load
anything from elsewhere and to run inline scripts.
"""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

# URLs are relative, so that a --root-path need not be known.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Penstock API</title>
<link rel="icon" href="data:,">
{head}</head>
<body>
{body}</body>
</html>
"""
_PAGES = {
    "docs": _PAGE.format(
        head='<link rel="stylesheet" href="docs/swagger-ui.css">\n',
        body='<div id="swagger-ui"></div>\n<script src="docs/swagger-ui-bundle.js"></script>\n'
        '<script src="docs/start-swagger.js"></script>\n',
    ),
    "redoc": _PAGE.format(
        head="",
        body='<div id="redoc"></div>\n<script src="docs/redoc.standalone.js"></script>\n'
        '<script src="docs/start-redoc.js"></script>\n',
    ),
}
_STARTS = {
    "start-swagger.js": 'SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui"});\n',
    "start-redoc.js": 'Redoc.init("openapi.json", {}, document.getElementById("redoc"));\n',
}
_PACKAGED = ("swagger-ui.css", "swagger-ui-bundle.js", "redoc.standalone.js")
_MEDIA_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
# As of the page at `/`, but for trusted types, and for what one of the two needs: both insert
# pictures of their own; ReDoc inserts styles too, and searches in a worker.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'{styles}; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'{workers}"
)
_POLICIES = {
    "docs": _POLICY.format(styles="", workers=""),
    "redoc": _POLICY.format(styles=" 'unsafe-inline'", workers="; worker-src blob:"),
}
_HEADERS = {
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@router.get("/docs")
async def swagger() -> Response:
    return _page("docs")


@router.get("/redoc")
async def redoc() -> Response:
    return _page("redoc")


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    """Raises HTTPException for unknown names."""
    if name not in (*_PACKAGED, *_STARTS):
        raise HTTPException(404)
    headers = {**_HEADERS, "cache-control": "no-cache"}
    return Response(_content(name), headers=headers, media_type=_MEDIA_TYPES[name.split(".")[-1]])


def _page(name: str) -> Response:
    headers = {**_HEADERS, "content-security-policy": _POLICIES[name]}
    return Response(_PAGES[name], headers=headers, media_type="text/html; charset=utf-8")


@cache
def _content(name: str) -> bytes:
    if name in _STARTS:
        return _STARTS[name].encode()
    return (files("fastapi_offline") / "static" / name).read_bytes()

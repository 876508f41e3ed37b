"""vLLM's routes `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, for who has the admin key.

Adapters are read from below --lora-root alone: the path, and each file of the adapter, after all
links in it have been followed.
"""

import asyncio
import logging
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from penstock.engine.client import ADAPTER_FILES, AdapterRefused, printable
from penstock.server.api.common import body_of, check_own_key, service_of
from penstock.server.errors import AdaptersFixed, InvalidRequest, ModelNotFound
from penstock.server.service import Service

logger = logging.getLogger("penstock")

router = APIRouter()

KEY_HEADER = "x-penstock-admin-key"
_MAX_NAME_CHARS = 256
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME_CHARS)]


class LoadRequest(msgspec.Struct):
    lora_name: _Name
    lora_path: Annotated[str, msgspec.Meta(min_length=1)]
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct):
    lora_name: _Name


Fields = TypeVar("Fields", LoadRequest, UnloadRequest)


@router.post("/v1/load_lora_adapter", include_in_schema=False)
async def load(http: Request) -> Response:
    service, root = _allowed(http)
    fields = await _fields(http, LoadRequest)
    name = fields.lora_name
    if name in service.model.names:
        raise InvalidRequest(f"{name!r} is a name of the model", param="lora_name")
    if not name.isprintable():
        raise InvalidRequest("a name must be printable", param="lora_name")
    directory = await asyncio.to_thread(_directory, root, fields.lora_path)
    try:
        await service.adapters.load(name, str(directory), in_place=fields.load_inplace)
    except AdapterRefused as error:
        raise InvalidRequest(str(error), param="lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", include_in_schema=False)
async def unload(http: Request) -> Response:
    """Requests that run with it go on; new ones do not find it."""
    service, _ = _allowed(http)
    name = (await _fields(http, UnloadRequest)).lora_name
    if not service.adapters.unload(name):
        raise ModelNotFound(name, service.model.name)
    logger.info("adapter %s: unloaded", printable(name))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _allowed(http: Request) -> tuple[Service, Path]:
    """The --lora-root, for who has the key. Raises AdaptersFixed, InvalidApiKey."""
    service = service_of(http)
    config = service.config.server
    if config.lora_root is None or config.admin_key is None:
        raise AdaptersFixed
    check_own_key(http, KEY_HEADER, config.admin_key)
    return service, config.lora_root


async def _fields(http: Request, kind: type[Fields]) -> Fields:
    try:
        return msgspec.json.decode(await body_of(http), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not as this route needs it: {error}") from None


def _directory(root: Path, given: str) -> Path:
    """Where an adapter is, all links followed. given: below root, or absolute. Raises
    InvalidRequest."""
    try:
        root = root.resolve(strict=True)
        directory = (root / given).resolve()
        files = [(directory / name).resolve() for name in ADAPTER_FILES]
        is_there = directory.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null character
        raise InvalidRequest(f"lora_path cannot be followed: {error}", param="lora_path") from None
    if not all(path.is_relative_to(root) for path in (directory, *files)):
        raise InvalidRequest(
            "lora_path leads out of --lora-root, links followed; copy the adapter to below it",
            param="lora_path",
        )
    if not is_there:
        raise InvalidRequest(
            f"there is no directory {given!r} below --lora-root", param="lora_path"
        )
    return directory

"""`/v1/models`: the model that is served, under each of its names, and its adapters.

vLLM's routes `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` are for who has the admin key.
Adapters are read from below --lora-root alone: the path, and each file of the adapter, after all
links in it have been followed.
"""

import asyncio
import logging
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from penstock.engine.client import ADAPTER_FILES, AdapterRefused, printable
from penstock.server.api.common import body_of, check_own_key, json_response, service_of
from penstock.server.errors import AdaptersFixed, InvalidRequest, ModelNotFound
from penstock.server.service import Service

logger = logging.getLogger("penstock")

router = APIRouter()

# OpenAI's cards once had this, and vLLM's still have.
_PERMISSION: dict[str, object] = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)  # llama.cpp's path
async def models(request: Request) -> Response:
    service = service_of(request)
    names = [*service.model.names, *service.engine.adapters.by_name]
    cards = [_model_card(service, name) for name in names]
    # Anthropic's fields of a page
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": cards, **page})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    return json_response(_model_card(service_of(request), name))


def _model_card(service: Service, name: str) -> dict[str, object]:
    """OpenAI's fields, vLLM's and Anthropic's, since the clients of all use this path.

    root: the model that the server was started with, where vLLM's clients find its tokenizer; of an
    adapter, its directory. parent: of an adapter, its base model. Ours alone: quantization, what
    --quantization did, null without it; model_impl, whose implementation of the family computes the
    model, "penstock" or "transformers", which is slow.

    Raises ModelNotFound.
    """
    model, adapter = service.model_named(name), service.engine.adapters.by_name.get(name)
    quantization = model.info.quantization
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "penstock",
        "root": adapter.path if adapter else service.config.engine.model,
        "parent": (adapter.base_model_name or service.model.name) if adapter else None,
        "permission": [_PERMISSION | {"id": f"modelperm-{name}", "created": model.created_s}],
        "max_model_len": model.info.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created_s, UTC),
        "lifecycle": "active",
        "max_input_tokens": model.info.max_model_len,
        "quantization": None if quantization is None else asdict(quantization),
        "model_impl": model.info.model_impl,
    }


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
        await service.engine.adapters.load(name, str(directory), in_place=fields.load_inplace)
    except AdapterRefused as error:
        raise InvalidRequest(str(error), param="lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", include_in_schema=False)
async def unload(http: Request) -> Response:
    """Requests that run with it go on; new ones do not find it."""
    service, _ = _allowed(http)
    name = (await _fields(http, UnloadRequest)).lora_name
    if not service.engine.adapters.unload(name):
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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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

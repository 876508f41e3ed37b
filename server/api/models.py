"""`/v1/models`: the model that is served, under each of its names."""

from dataclasses import asdict
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.common import json_response, service_of
from penstock.server.service import Service

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
    names = [*service.model.names, *service.adapters.by_name]
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
    model, adapter = service.model_named(name), service.adapters.by_name.get(name)
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

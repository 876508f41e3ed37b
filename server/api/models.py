"""`/v1/models`: the model that is served, under each of its names."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.common import check_model, json_response, service_of
from penstock.server.prompt.model import ServedModel

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    model = service_of(request).model
    cards = [_model_card(model, name) for name in model.names]
    # Anthropic's fields of a page
    page = {"has_more": False, "first_id": model.names[0], "last_id": model.names[-1]}
    return json_response({"object": "list", "data": cards, **page})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = service_of(request)
    check_model(service.model, name)
    return json_response(_model_card(service.model, name))


def _model_card(model: ServedModel, name: str) -> dict[str, object]:
    """OpenAI's fields and Anthropic's, since the clients of both use this path."""
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "penstock",
        "max_model_len": model.info.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created_s, UTC),
        "lifecycle": "active",
        "max_input_tokens": model.info.max_model_len,
    }

"""Routes for an operator's tools: `/health`, `/ready`, `/version`, `/metrics`, `/steps`."""

import asyncio
import gzip

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, gzip_accepted
from starlette.responses import Response

from penstock.server.api.common import json_response, service_of
from penstock.server.observability.version import version

router = APIRouter()


@router.get("/health")
@router.get("/ping")  # SageMaker's path, and vLLM's, which may also be posted to
@router.post("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    """Alive: whether a restart would help."""
    service_of(request).check_health()
    return json_response({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether traffic should come."""
    service_of(request).check_ready()
    return json_response({"status": "ready"})


@router.get("/version")
async def show_version(request: Request) -> Response:
    """computed_by is null while the model loads, and mostly on a GPU; the parallel sizes while it
    loads, and gpu_way on a CPU too. failed_gpu_ways: why each of them is not used."""
    service = service_of(request)
    info = service.model.info if service.is_loaded else None
    return json_response(
        {
            "version": version(),
            "computed_by": info.computed_by if info else None,
            "tensor_parallel_size": info.tensor_parallel_size if info else None,
            "pipeline_parallel_size": info.pipeline_parallel_size if info else None,
            "gpu_way": service.engine.info.gpu_way if info else None,
            "failed_gpu_ways": service.engine.failed_ways if info else {},
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = service_of(request).metrics.text()
    headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, "vary": "accept-encoding"}
    if gzip_accepted(request.headers.get("accept-encoding", "")):
        # The lowest level gives a tenth of the bytes. In a thread, as streams need the event loop.
        text = await asyncio.to_thread(gzip.compress, text, 1)
        headers["content-encoding"] = "gzip"
    return Response(text, headers=headers)


@router.get("/steps")
async def steps(request: Request) -> Response:
    """Steps that ran: what each computed and how long it took. `penstock calibrate` reads them."""
    service = service_of(request)
    scheduler = service.config.engine.scheduler
    return json_response(service.steps.as_json() | {"scheduler": scheduler, "version": version()})

"""OpenTelemetry traces: a span per request, with child spans for queue, prefill and decode.

Spans are made when a request has ended, from times that are recorded anyway: tokens cost nothing.
A thread of OpenTelemetry's sends them, and drops them if the collector cannot be reached.
Attributes follow OpenTelemetry's semantic conventions for generative AI.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.scheduler.errors import InvalidConfig
from penstock.server.observability.request_log import EndedRequest, request_id, trace_headers
from penstock.server.observability.version import version

if TYPE_CHECKING:  # an optional dependency of --otlp-traces-endpoint
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

# W3C Trace Context: the client's trace, and its span within it.
TRACE_HEADERS = ("traceparent", "tracestate")
_DEFAULT_PATH = "/v1/traces"
# How long shutdown waits for unsent spans.
_CLOSE_TIMEOUT_S = 3.0


class Tracer:
    """Makes and sends the spans of one server."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        name = os.environ.get("OTEL_SERVICE_NAME", "penstock")
        resource = Resource.create({"service.name": name, "service.version": version()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("penstock", version())

    @classmethod
    def to_endpoint(cls, url: str) -> "Tracer":
        """url: a collector's; without a path, that of OTLP traces is added. Raises InvalidConfig if
        OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InvalidConfig(
                "--otlp-traces-endpoint requires OpenTelemetry; install it with "
                "pip install 'penstock[otel]', or leave the flag out"
            ) from error
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        endpoint = url if path else f"{scheme}://{host}{_DEFAULT_PATH}"
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def begin(self, model_name: str) -> Callable[[EndedRequest], None]:
        """Returns what records the HTTP request whose task calls this, when it has ended."""
        return partial(
            self._record,
            model_name=model_name,
            headers=trace_headers.get() or {},
            http_id=request_id.get(),
        )

    def _record(
        self,
        request: EndedRequest,
        model_name: str,
        headers: dict[str, str],
        http_id: str | None,
    ) -> None:
        """http_id: of the HTTP request, as its answer's X-Request-Id gives it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end_s = time.monotonic()
        # One offset for all: between readings of the two clocks this thread may have to wait.
        wall_ns = partial(_wall_ns, time.time_ns() - time.monotonic_ns())
        span = self._tracer.start_span(
            f"{request.operation} {model_name}",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            start_time=wall_ns(request.arrival_s),
        )
        if span.is_recording():
            span.set_attributes(_attributes(request, model_name))
            if http_id:
                span.set_attribute("penstock.request_id", http_id)
            if request.outcome == "failed":
                span.set_status(Status(StatusCode.ERROR))
            self._record_phases(request, end_s, wall_ns, set_span_in_context(span))
        span.end(wall_ns(end_s))

    def close(self) -> None:
        """Sends the remaining spans, waiting for at most _CLOSE_TIMEOUT_S."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_CLOSE_TIMEOUT_S)

    def _record_phases(
        self,
        request: EndedRequest,
        end_s: float,
        wall_ns: Callable[[float], int],
        context: Any,
    ) -> None:
        """Each phase ends where the next begins, and the last one with the last token, or the
        request if there was none."""
        phases = [("queue", request.arrival_s)]
        if request.started_s is not None:
            phases.append(("prefill", request.started_s))
        if request.first_token_s is not None:
            phases.append(("decode", request.first_token_s))
        last_s = request.last_token_s if request.last_token_s is not None else end_s
        ends_s = [*(start_s for _, start_s in phases[1:]), last_s]
        for (name, start_s), phase_end_s in zip(phases, ends_s, strict=True):
            span: Span = self._tracer.start_span(name, context, start_time=wall_ns(start_s))
            span.end(wall_ns(phase_end_s))


def _attributes(request: EndedRequest, model_name: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": request.id,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "penstock.outcome": request.outcome,
    }
    if sampling := request.sampling:
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.choice.count": request.num_choices,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
            "gen_ai.response.finish_reasons": request.finish_reasons,
        }
    if request.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = request.ttft_s
    if request.outcome == "failed":
        attributes["error.type"] = "server_error"
    return attributes


def _wall_ns(offset_ns: int, monotonic_s: float) -> int:
    """Returns a time of time.monotonic() as Unix time, offset_ns later."""
    return offset_ns + round(monotonic_s * 1e9)

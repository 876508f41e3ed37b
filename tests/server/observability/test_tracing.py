"""Traces, as a collector on the loopback interface receives them by OTLP."""

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from penstock.scheduler.errors import InvalidConfig
from penstock.server.config import ServerConfig
from penstock.server.observability.tracing import Tracer
from tests.support.serving import MODEL, RunningServer, running_server, wait_until

TRACE_ID, PARENT_SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Keeps the spans that arrive over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def request(self, **attributes: Any) -> tuple[Span, dict[str, Span]]:
        """The request span with these attributes, and its child spans by name."""

        def find() -> Span | None:
            return next((s for s in self.spans if attributes.items() <= _read(s).items()), None)

        wait_until(lambda: find() is not None)
        span = find()
        assert span
        children = [child for child in self.spans if child.parent_span_id == span.span_id]
        assert len({child.name for child in children}) == len(children)
        return span, {child.name: child for child in children}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _read(span: Span) -> dict[str, Any]:
    """The attributes of a span as Python values."""
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind or "string_value")
        is_list = kind == "array_value"
        values[pair.key] = [item.string_value for item in value.values] if is_list else value
    return values


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms until spans are sent
        flags = ("--otlp-traces-endpoint", collector.url, "--scripted-step-ms", "5")
        with running_server(*flags) as server:
            yield server


def test_a_request_is_a_span_of_the_clients_trace_with_its_phases(
    server: RunningServer, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_SPAN_ID}-01", "x-request-id": "ours"}
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 20, "n": 2, "temperature": 0.5}
    body |= {"top_p": 0.75, "top_k": 20}
    answer = server.post("/v1/completions", body | {"ignore_eos": True}, headers=headers).json()
    span, phases = collector.request(**{"gen_ai.response.id": answer["id"]})
    assert collector.paths == {"/v1/traces"}
    assert span.name == f"text_completion {MODEL}"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_SPAN_ID)
    assert list(phases) == ["queue", "prefill", "decode"]
    queue, prefill, decode = phases.values()
    assert queue.start_time_unix_nano == span.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= span.end_time_unix_nano
    assert decode.end_time_unix_nano - decode.start_time_unix_nano >= 18 * 5e6
    attributes = _read(span)
    ttft_s = (prefill.end_time_unix_nano - queue.start_time_unix_nano) / 1e9
    ours = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert ours == pytest.approx(ttft_s, abs=1e-6)
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 20,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "penstock.outcome": "length",
        "penstock.request_id": "ours",
    }


def test_a_stream_without_traceparent_begins_a_new_trace(
    server: RunningServer, collector: Collector
) -> None:
    server.chat(stream=True, max_tokens=3)
    span, phases = collector.request(**{"gen_ai.operation.name": "chat"})
    assert span.trace_id.hex() != TRACE_ID
    assert not span.parent_span_id
    assert set(phases) == {"queue", "prefill", "decode"}


def test_embeddings_are_a_span_without_a_decode(
    server: RunningServer, collector: Collector
) -> None:
    server.post("/v1/embeddings", {"model": MODEL, "input": [[5, 6, 7], [8, 9]]})
    span, phases = collector.request(**{"gen_ai.operation.name": "embeddings"})
    assert list(phases) == ["queue", "prefill"]
    assert _read(span)["gen_ai.usage.input_tokens"] == 5
    assert "gen_ai.usage.output_tokens" not in _read(span)


def test_a_request_whose_client_disconnects_is_traced_too(
    server: RunningServer, collector: Collector
) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 5000, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"ignore_eos": True}) as stream:
        events = stream.iter_raw()
        next(events)
    span, phases = collector.request(**{"penstock.outcome": "abandoned"})
    assert _read(span)["gen_ai.usage.output_tokens"] < 5000
    assert "decode" in phases


def test_a_trace_that_the_client_does_not_sample_is_not_recorded(
    server: RunningServer, collector: Collector
) -> None:
    other = TRACE_ID[::-1]
    headers = {"traceparent": f"00-{other}-{PARENT_SPAN_ID}-00"}
    server.post("/v1/completions", {"model": MODEL, "prompt": "a"}, headers=headers)
    last = server.complete(max_tokens=7).json()["id"]
    collector.request(**{"gen_ai.response.id": last})
    assert other not in {span.trace_id.hex() for span in collector.spans}


def test_without_the_extra_the_flag_is_refused_with_an_install_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)  # importing it now fails
    with pytest.raises(InvalidConfig, match=r"pip install 'penstock\[otel\]'"):
        Tracer.to_endpoint("http://127.0.0.1:4318")


def test_an_endpoint_that_is_not_a_url_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="write it like http://localhost:4318/v1/traces"):
        ServerConfig(served_model_names=("m",), otlp_traces_endpoint="localhost:4317")


@pytest.mark.slow
def test_a_server_answers_and_stops_in_time_without_its_collector() -> None:
    with running_server("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces") as server:
        assert server.complete().status_code == 200
        server.process.terminate()
        assert server.exit_code(timeout_s=30)[0] == 0

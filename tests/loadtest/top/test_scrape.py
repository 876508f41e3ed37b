"""What `penstock top` computes from /metrics: quantiles as Prometheus's, rates, restarts, and
errors for wrong addresses."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock.loadtest.top.cli import main
from penstock.loadtest.top.scrape import (
    Buckets,
    History,
    NotPenstock,
    Scrape,
    Scraper,
    ServerUnreachable,
    Window,
    parse,
)
from tests.support.serving import free_port

INF = math.inf


def buckets(*pairs: tuple[float, float]) -> Buckets:
    return Buckets(tuple(bound for bound, _ in pairs), tuple(count for _, count in pairs), 0.0)


def scrape_at(time_s: float, text: str) -> Scrape:
    return parse(text, time_s)


def test_a_quantile_is_linear_inside_its_bucket() -> None:
    seen = buckets((1, 10), (2, 30), (4, 40), (INF, 40))
    assert seen.quantile(0.5) == pytest.approx(1.5)  # 10 of the 20 between 1 and 2
    assert seen.quantile(0.75) == pytest.approx(2.0)
    assert seen.quantile(0.875) == pytest.approx(3.0)


def test_the_first_bucket_starts_at_zero() -> None:
    assert buckets((0.01, 8), (INF, 8)).quantile(0.25) == pytest.approx(0.0025)


def test_a_first_bucket_below_zero_has_no_inside() -> None:
    assert buckets((-1, 8), (1, 9), (INF, 9)).quantile(0.25) == -1


def test_a_quantile_above_the_last_finite_bound_is_that_bound() -> None:
    assert buckets((1, 1), (2, 2), (INF, 100)).quantile(0.99) == 2


def test_empty_buckets_between_are_skipped() -> None:
    seen = buckets((1, 2), (2, 2), (3, 2), (4, 4), (INF, 4))
    assert seen.quantile(0.5) == pytest.approx(1.0)
    assert seen.quantile(0.75) == pytest.approx(3.5)


@pytest.mark.parametrize(
    "nothing",
    [
        buckets(),
        buckets((INF, 5)),  # one bucket has no quantiles
        buckets((1, 5), (2, 5)),  # without +Inf it is not whole
        buckets((1, 0), (INF, 0)),
    ],
)
def test_there_is_no_quantile_where_prometheus_returns_nan(nothing: Buckets) -> None:
    assert nothing.quantile(0.5) is None


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95, 0.99])
def test_a_quantile_is_within_the_bucket_of_the_true_one(q: float) -> None:
    samples = sorted(((i * 7919) % 1000) / 1000 for i in range(1, 1000))
    bounds = [0.1, 0.2, 0.5, 0.75, 1.0, INF]
    seen = buckets(*((b, float(sum(s <= b for s in samples))) for b in bounds))
    true, estimated = samples[int(q * len(samples))], seen.quantile(q)
    assert estimated is not None
    lower, upper = max([0.0, *(b for b in bounds if b < true)]), min(b for b in bounds if b >= true)
    assert lower <= estimated <= upper
    assert estimated == pytest.approx(true, abs=0.01)  # they are spread evenly


TTFT = """\
# TYPE penstock_step_time_seconds histogram
penstock_step_time_seconds_bucket{class="decode",le="1.0"} 4
penstock_step_time_seconds_bucket{class="decode",le="+Inf"} 4
penstock_step_time_seconds_count{class="decode"} 4
penstock_step_time_seconds_sum{class="decode"} 2.0
penstock_step_time_seconds_bucket{class="mixed",le="1.0"} 1
penstock_step_time_seconds_bucket{class="mixed",le="+Inf"} 2
penstock_step_time_seconds_count{class="mixed"} 2
penstock_step_time_seconds_sum{class="mixed"} 5.0
"""


def test_a_histogram_is_one_class_or_the_sum_of_all() -> None:
    scrape = scrape_at(0, TTFT)
    assert scrape.histogram("step_time_seconds", **{"class": "decode"}).mean == 0.5
    both = scrape.histogram("step_time_seconds")
    assert both.bounds == (1.0, INF) and both.counts == (5.0, 6.0) and both.sum == 7.0
    assert scrape.histogram("nothing_seconds").count == 0


def test_a_rate_is_the_increase_over_the_time_between() -> None:
    window = Window(
        scrape_at(10, 'penstock_requests_total{outcome="stop"} 5\n'),
        scrape_at(
            12,
            'penstock_requests_total{outcome="stop"} 8\n'
            'penstock_requests_total{outcome="length"} 1\n',
        ),
    )
    assert window.rate("requests_total") == 2.0
    assert window.rate("requests_total", outcome="stop") == 1.5
    assert window.rate("requests_total", outcome="none") is None
    assert window.share("requests_total", "nothing_total") is None


def test_a_histogram_of_a_window_has_only_the_observations_between() -> None:
    later = TTFT.replace('mixed",le="1.0"} 1', 'mixed",le="1.0"} 3').replace("} 2\n", "} 4\n")
    between = Window(scrape_at(0, TTFT), scrape_at(1, later)).histogram("step_time_seconds")
    assert between.counts == (2.0, 2.0)


def test_history_keeps_its_span_and_is_cleared_by_a_restart() -> None:
    history = History(span_s=60)
    for second in range(100):
        history.add(scrape_at(second, f"penstock_preemptions_total {second}\n"))
    whole, last = history.whole(), history.last_interval()
    assert whole and whole.seconds == 60 and whole.increase("preemptions_total") == 60
    assert last and last.seconds == 1
    history.add(scrape_at(100, "penstock_preemptions_total 0\n"))
    assert history.whole() is None and history.latest


def test_only_our_own_series_are_kept() -> None:
    scrape = scrape_at(0, "vllm:num_requests_running 5\npenstock_running_sequences 3\n")
    assert scrape.value("running_sequences") == 3 and len(scrape.values) == 1


@contextmanager
def answering(status: int, body: str, **headers: str) -> Iterator[str]:
    """Another program's server, with one response to every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, "<html>hello</html>", "has no Penstock metrics"),
        (200, "vllm:num_requests_running 5\n", "has no Penstock metrics"),
        (404, "", "returned status 404; give the address"),
        (401, "", "give it with --api-key"),
    ],
)
def test_another_server_is_reported_with_the_reason(status: int, body: str, sentence: str) -> None:
    with answering(status, body) as url, pytest.raises(NotPenstock, match=sentence):
        Scraper(url, None).scrape()


def test_a_redirect_is_not_followed_with_the_key() -> None:
    with (
        answering(200, "penstock_running_sequences 1\n") as elsewhere,
        answering(302, "", Location=elsewhere) as url,
        pytest.raises(NotPenstock, match="status 302"),
    ):
        Scraper(url, "secret").scrape()


def test_a_server_that_loads_or_is_down_is_unreachable() -> None:
    with answering(503, "") as url, pytest.raises(ServerUnreachable, match="status 503"):
        Scraper(url, None).scrape()
    with pytest.raises(ServerUnreachable, match="connection refused"):
        Scraper(f"http://127.0.0.1:{free_port()}", None).scrape()


def test_errors_are_printed_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"127.0.0.1:{free_port()}", "--once"]) == 1
    assert "is unreachable: connection refused" in capsys.readouterr().err
    assert main(["ftp://x", "--once"]) == 2
    assert "write it like" in capsys.readouterr().err
    assert main([]) == 2  # no terminal
    assert "add --once" in capsys.readouterr().err

"""Every number on /metrics is compared with an independent count."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
from penstock.engine.step.executor import PendingTokens
from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import Abort, FromEngine, StepReport, Submit, ToEngine
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import NO_WORK, GroupBlocks, SchedulerStats, StepClass
from penstock.scheduler.step_model.amounts import AttentionGroup
from penstock.scheduler.types import Finish, RequestId, ScheduledBatch
from penstock.server.observability.metrics import Metrics
from penstock.server.observability.step_window import RecentSteps
from penstock.server.observability.version import checkout_commit
from tests.support.scheduling import make_request
from tests.support.scraping import Scrape
from tests.support.serving import MODEL, RunningServer, running_server, wait_until
from tests.support.timing import Disturbance

INFO = replace(
    scripted_info(num_blocks=14, block_size=4, max_model_len=48),
    weight_bytes=1000,
    attention=(AttentionGroup(window=None, kv_bytes_per_token=10, flops_per_pair=1),),
    flops_per_token=7,
    flops_per_sampled_token=3,
    peak_bandwidth_bytes_per_s=1e6,
    measured_bandwidth_bytes_per_s=5e5,
    peak_flops_per_s=1e6,
)


class RecordingExecutor(ScriptedExecutor):
    """Records the batches that it runs."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.batches: list[ScheduledBatch] = []

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        self.batches.append(batch)
        return super().execute(batch)


class Load:
    """A load on a KV pool that is too small for it, and the engine's reports of it."""

    def __init__(self) -> None:
        self.metrics = Metrics("model")
        self.metrics.on_ready(INFO)
        self.reports: list[StepReport] = []
        self.executor = RecordingExecutor()
        self._commands: list[ToEngine] = []
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            groups=INFO.kv_groups,
            block_size=INFO.block_size,
            max_model_len=INFO.max_model_len,
        )
        self._loop = EngineLoop(scheduler, self.executor, self, self._on_message)
        self._scheduler = scheduler

    def receive(self, timeout_s: float | None) -> Iterable[ToEngine]:
        """See `penstock.engine.step.loop.Inbox`."""
        commands, self._commands = self._commands, []
        return commands

    def submit(self, name: str, num_prompt: int, **fields: Any) -> None:
        request = make_request(name, num_prompt, **fields)
        self.metrics.on_submit(request.id, num_prompt, request.arrival_s, request.n)
        self._commands.append(Submit(request))

    def abort(self, name: str) -> None:
        self._commands.append(Abort(RequestId(name)))

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self._loop.step()

    def finish(self) -> None:
        while self._scheduler.has_work or self._commands:
            self._loop.step()

    def scrape(self) -> Scrape:
        return Scrape(self.metrics.text().decode())

    @property
    def finishes(self) -> list[Finish]:
        outputs = itertools.chain.from_iterable(report.outputs for report in self.reports)
        return [output.finish for output in outputs if output.finish]

    def _on_message(self, message: FromEngine) -> None:
        assert isinstance(message, StepReport)
        self.reports.append(message)
        self.metrics.on_step(message)


@pytest.fixture(scope="module")
def load() -> Load:
    load = Load()
    load.submit("a", 9, max_tokens=20, n=2)
    load.submit("b", 13, max_tokens=20)
    load.step(4)
    load.submit("c", 13, max_tokens=20)
    load.submit("d", 30, max_tokens=5)
    load.step(3)
    load.submit("gone", 5, max_tokens=20)
    load.abort("gone")
    load.abort("c")
    load.finish()
    load.submit("b again", 13, max_tokens=1)
    load.finish()
    return load


def _kind(batch: ScheduledBatch) -> str:
    if batch.num_decodes == len(batch.slots):
        return "decode"
    return "mixed" if batch.num_decodes else "prefill"


def _bytes(batch: ScheduledBatch) -> int:
    return 1000 + 10 * sum(map(sum, zip(batch.starts, batch.num_tokens, strict=True)))


def _flops(batch: ScheduledBatch) -> int:
    rows = zip(batch.starts, batch.num_tokens, strict=True)
    pairs = sum(position + 1 for start, n in rows for position in range(start, start + n))
    return 7 * sum(batch.num_tokens) + 3 * sum(batch.samples) + pairs


def test_the_load_increases_every_counter(load: Load) -> None:
    scrape = load.scrape()
    for name in ("preemptions", "recomputed_tokens", "cached_prompt_tokens", "generated_tokens"):
        assert scrape(f"{name}_total") > 0, name
    assert {_kind(batch) for batch in load.executor.batches} == set(StepClass)


def test_tokens_and_preemptions_match_the_finished_sequences(load: Load) -> None:
    scrape, outputs = load.scrape(), [o for report in load.reports for o in report.outputs]
    assert scrape("prompt_tokens_total") == 9 + 13 + 13 + 30 + 5 + 13
    assert scrape("generated_tokens_total") == sum(len(output.token_ids) for output in outputs)
    assert scrape("preemptions_total") == sum(f.num_preemptions for f in load.finishes)
    assert scrape("recomputed_tokens_total") == sum(f.num_recomputed_tokens for f in load.finishes)


def test_cached_tokens_are_the_prompt_tokens_that_no_step_computed(load: Load) -> None:
    cached = {
        output.request_id: output.num_cached_tokens
        for report in load.reports
        for output in report.outputs
        if output.finish and output.index == 0
    }
    assert load.scrape()("cached_prompt_tokens_total") == sum(cached.values())


def test_steps_are_counted_by_class(load: Load) -> None:
    scrape, batches = load.scrape(), load.executor.batches
    kinds = Counter(map(_kind, batches))
    for kind in ("decode", "prefill", "mixed"):
        of_kind = [batch for batch in batches if _kind(batch) == kind]
        labels = {"class": kind}
        assert scrape("step_time_seconds_count", **labels) == kinds[kind]
        assert scrape("model_bytes_total", **labels) == sum(map(_bytes, of_kind))
        assert scrape("model_flops_total", **labels) == sum(map(_flops, of_kind))
    assert scrape("batch_size_sequences_count") == len(batches)
    assert scrape("batch_size_sequences_sum") == sum(len(batch.slots) for batch in batches)
    assert scrape("step_tokens_sum") == sum(sum(batch.num_tokens) for batch in batches)


def test_busy_time_is_the_sum_of_the_steps(load: Load) -> None:
    scrape, busy_s = load.scrape(), sum(report.step_s for report in load.reports)
    assert scrape("engine_busy_seconds_total") == pytest.approx(busy_s)
    by_class = [scrape("step_time_seconds_sum", **{"class": kind}) for kind in StepClass]
    assert sum(by_class) == pytest.approx(busy_s)


def test_queue_time_is_observed_once_for_each_answer_that_started(load: Load) -> None:
    started = {(s.request_id, s.index): s.at_s for r in load.reports for s in r.started}
    scrape = load.scrape()
    assert "gone" not in {request_id for request_id, _ in started}
    assert scrape("queue_time_seconds_count") == len(started) == 6
    # The scripted requests all arrive at 0 of the clock.
    assert scrape("queue_time_seconds_sum") == pytest.approx(sum(started.values()))


def test_utilization_is_bytes_and_operations_over_the_time_of_the_steps(load: Load) -> None:
    scrape = load.scrape()
    for kind in (*StepClass, "all"):
        of_kind = [
            (batch, report.step_s)
            for batch, report in zip(
                load.executor.batches, (r for r in load.reports if r.step), strict=True
            )
            if kind in ("all", _kind(batch))
        ]
        step_s = sum(seconds for _, seconds in of_kind)
        for what, cost, peaks in (
            ("bandwidth", _bytes, {"datasheet": 1e6, "measured": 5e5}),
            ("flops", _flops, {"datasheet": 1e6}),
        ):
            for peak, value in peaks.items():
                shown = scrape(f"model_{what}_utilization_ratio", **{"class": kind, "peak": peak})
                expected = sum(cost(batch) for batch, _ in of_kind) / step_s / value
                assert shown == pytest.approx(expected), (kind, what, peak)


def test_cache_usage_is_the_share_of_the_blocks_that_sequences_hold() -> None:
    load = Load()
    load.submit("a", 9, max_tokens=20)
    load.step(2)
    scrape = load.scrape()
    used = scrape("kv_used_blocks")
    blocks = used + scrape("kv_idle_blocks") + scrape("kv_free_blocks")
    assert used > 0 and scrape("kv_cache_usage_ratio") == pytest.approx(used / blocks)


def _report(started_s: float, step_s: float) -> StepReport:
    return StepReport(
        1,
        StepOutputs(),
        SchedulerStats(),
        NO_WORK,
        started_s,
        step_s,
        model_bytes=100,
        model_flops=0,
    )


def test_idle_ratio_covers_the_last_ten_seconds_across_step_boundaries() -> None:
    recent = RecentSteps()
    recent.begin(1000.0)
    for started_s, step_s in [(1001.0, 0.5), (1001.5, 0.75), (1004.9, 3.2)]:
        recent.add(_report(started_s, step_s), StepClass.DECODE)
    assert recent.idle_ratio(1010.0, is_stepping=False) == pytest.approx(1 - 4.45 / 10)
    assert recent.idle_ratio(1010.0, is_stepping=True) == pytest.approx(1 - (4.45 + 1.9) / 10)
    assert recent.idle_ratio(1016.0, is_stepping=False) == pytest.approx(1 - 2.1 / 10)
    assert recent.idle_ratio(1030.0, is_stepping=False) == 1.0
    assert recent.idle_ratio(1030.0, is_stepping=True) == 0.0


def test_the_bubble_is_the_part_of_the_steps_time_that_stages_do_not_compute() -> None:
    metrics = Metrics("model")
    metrics.on_ready(replace(INFO, pipeline_parallel_size=2))
    began_s = time.monotonic() - 2.0
    for number, computed_s in enumerate((0.2, 0.4)):
        report = _report(began_s + number / 2, 0.5)
        metrics.on_step(msgspec.structs.replace(report, computed_s=computed_s))
    shown = Scrape(metrics.text().decode())("pipeline_bubble_ratio")
    assert shown == pytest.approx(0.4)


def test_steps_before_the_window_are_dropped() -> None:
    recent = RecentSteps()
    for second in range(1000, 1100):
        recent.add(_report(second + 0.5, 0.001), StepClass.MIXED)
    assert recent.totals(1099.9)[StepClass.MIXED].model_bytes == 11 * 100
    assert recent.totals(2000.0)[StepClass.MIXED].model_bytes == 0


# Over HTTP.


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ("--max-num-seqs", "4", "--metrics-alias", "vllm", "--scripted-step-ms", "1")
    with running_server(*flags) as server:
        yield server


def _ids(first: int, count: int) -> list[int]:
    return [3 + (first + i) % 200 for i in range(count)]


def test_a_known_load_is_counted_to_the_token(server: RunningServer) -> None:
    before, usages, lengths = Scrape.of(server), [], [3, 40, 40, 2]

    def ask(**fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = server.complete(return_token_ids=True, **fields).json()
        usages.append(answer["usage"])
        return answer

    ask(prompt=_ids(0, 3), n=3, max_tokens=10)
    first = ask(prompt=_ids(50, 40), max_tokens=12, ignore_eos=True)
    stop_id = first["choices"][0]["token_ids"][4]
    stopped = ask(prompt=_ids(50, 40), max_tokens=12, stop_token_ids=[stop_id])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    # A client that disconnects while its request waits: only its prompt is counted.
    hog = {"model": MODEL, "prompt": _ids(9, 2), "n": 4, "max_tokens": 2000, "stream": True}
    hog |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + "/v1/completions", json=hog, timeout=30) as running:
        lines = running.iter_lines()
        next(lines)
        queued = hog | {"prompt": _ids(7, 7), "n": 1}
        with httpx.stream("POST", server.url + "/v1/completions", json=queued):
            wait_until(lambda: server.metric("waiting_sequences") == 1)
        wait_until(lambda: server.metric("waiting_sequences") == 0)
        assert server.metric("running_sequences") == 4
        for _ in lines:
            pass
    vectors = server.post("/v1/embeddings", {"model": MODEL, "input": _ids(20, 6)}).json()
    server.wait_until_idle()
    wait_until(lambda: Scrape.of(server)("requests_total", outcome="abandoned") == 1)
    after = Scrape.of(server)

    def grew(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    generated = sum(usage["completion_tokens"] for usage in usages) + 4 * 2000
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    num_answers = 3 + 1 + 1 + 4
    assert vectors["usage"]["prompt_tokens"] == 6
    assert cached == 32
    assert grew("prompt_tokens_total") == sum(lengths) + 7 + 6
    assert grew("request_prompt_tokens_sum") == sum(lengths) + 7 + 6
    assert grew("request_prompt_tokens_count") == len(lengths) + 2
    assert grew("generated_tokens_total") == generated
    assert grew("request_generated_tokens_sum") == generated
    assert grew("cached_prompt_tokens_total") == grew("prefix_hit_tokens_total") == cached
    assert grew("prefix_query_tokens_total") == sum(lengths) + 6
    for name in ("time_to_first_token", "prefill_time", "decode_time", "time_per_output_token"):
        assert grew(f"{name}_seconds_count") == num_answers, name
    assert grew("request_generated_tokens_count") == num_answers
    assert grew("inter_token_latency_seconds_count") == generated - num_answers
    assert grew("queue_time_seconds_count") == num_answers + 1  # the embedding's prompt too
    outcomes = {name: grew("requests_total", outcome=name) for name in ("stop", "length", "failed")}
    assert outcomes == {"stop": 2, "length": 3, "failed": 0}
    assert grew("request_latency_seconds_count") == 5
    assert grew("preemptions_total") == grew("recomputed_tokens_total") == 0


def test_queue_prefill_and_decode_add_up_to_the_latency() -> None:
    with running_server("--scripted-step-ms", "20") as server, Disturbance() as disturbance:
        began_s = time.monotonic()
        server.complete(max_tokens=10)
        elapsed_s = time.monotonic() - began_s
        scrape = Scrape.of(server)
        queue, prefill, decode, ttft, latency = (
            scrape(f"{name}_seconds_sum")
            for name in (
                "queue_time",
                "prefill_time",
                "decode_time",
                "time_to_first_token",
                "request_latency",
            )
        )
        assert queue + prefill == pytest.approx(ttft)
        assert 9 * 0.020 * 0.95 < decode < latency < elapsed_s
        # Steps are timed when their report arrives, a first token when its stream takes it.
        assert -0.005 <= latency - ttft - decode < disturbance.tolerance_s(0.05)
        assert 0 < scrape("engine_idle_ratio") < 1
        assert scrape("engine_last_step_age_seconds") == 0  # there is no work


def test_buckets_resolve_a_token_of_2_ms_and_a_queue_time_of_5_ms(
    server: RunningServer,
) -> None:
    scrape = Scrape.of(server)
    tpot = list(scrape.buckets("penstock_time_per_output_token_seconds"))
    queue = list(scrape.buckets("penstock_queue_time_seconds"))
    assert {0.0015, 0.002, 0.0025} <= set(tpot) and {0.004, 0.005, 0.006} <= set(queue)
    for bounds in (tpot, queue):
        assert all(b / a <= 1.34 for a, b in itertools.pairwise(bounds[:-1]))


def test_gzip_shrinks_a_scrape_to_less_than_a_fifth(
    server: RunningServer,
) -> None:
    plain = server.get("/metrics", headers={"accept-encoding": "identity"})
    compressed = server.get("/metrics", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert compressed.headers["content-encoding"] == "gzip"
    assert int(compressed.headers["content-length"]) < int(plain.headers["content-length"]) / 5
    assert Scrape(compressed.text).names == Scrape(plain.text).names


def test_the_scrape_has_metrics_of_the_build_the_process_and_python(server: RunningServer) -> None:
    text = server.get("/metrics").text
    for start in (
        "penstock_build_info{commit=",
        "process_resident_memory_bytes ",
        "process_cpu_seconds_total ",
        "python_info{",
        "python_gc_collections_total{",
    ):
        assert f"\n{start}" in text, start


def test_the_commit_of_a_checkout_is_read_from_loose_and_packed_refs_and_a_detached_head(
    tmp_path: Any,
) -> None:
    git = tmp_path / ".git"
    git.mkdir()
    assert checkout_commit(tmp_path) is None
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs with: peeled\nabc123 refs/heads/main\n")
    assert checkout_commit(tmp_path) == "abc123"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("def456\n")
    assert checkout_commit(tmp_path) == "def456"
    (git / "HEAD").write_text("789abc\n")
    assert checkout_commit(tmp_path) == "789abc"


# Under vLLM's names.

_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "e2e_request_latency_seconds": "request_latency_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "request_prefill_time_seconds": "prefill_time_seconds",
    "request_decode_time_seconds": "decode_time_seconds",
    "request_inference_time_seconds": "inference_time_seconds",
    "request_params_n": "request_answers",
    "request_params_max_tokens": "request_max_tokens",
    "request_prefill_kv_computed_tokens": "request_computed_prompt_tokens",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generated_tokens",
    "iteration_tokens_total": "step_progress_tokens",
}
_PLAIN = {
    "num_requests_running": "running_sequences",
    "num_requests_waiting": "waiting_sequences",
    "prompt_tokens_total": "prompt_tokens_total",
    "prompt_tokens_cached_total": "cached_prompt_tokens_total",
    "generation_tokens_total": "generated_tokens_total",
    "num_preemptions_total": "preemptions_total",
    "prefix_cache_queries_total": "prefix_query_tokens_total",
    "prefix_cache_hits_total": "prefix_hit_tokens_total",
    "mm_cache_queries_total": "encoder_queries_total",
    "mm_cache_hits_total": "encoder_hits_total",
}
_OUTCOMES = {"stop": "stop", "length": "length", "abort": "abandoned", "error": "failed"}


def test_metrics_under_vllms_names_have_the_same_values(server: RunningServer) -> None:
    server.complete(n=2)
    scrape, labels = Scrape.of(server), {"model_name": MODEL, "engine": "0"}
    for theirs, ours in _HISTOGRAMS.items():
        for part in ("count", "sum"):
            shown = scrape.full(f"vllm:{theirs}_{part}", **labels)
            assert shown == scrape(f"{ours}_{part}") > 0, theirs
        assert scrape.buckets(f"vllm:{theirs}") == scrape.buckets(f"penstock_{ours}")
    for theirs, ours in _PLAIN.items():
        assert scrape.full(f"vllm:{theirs}", **labels) == scrape(ours), theirs
        assert f"vllm:{theirs}" in scrape.names
    assert scrape.full("vllm:request_num_preemptions_count", **labels) == scrape(
        "request_preemptions_count"
    )
    for reason in ("capacity", "deferred"):
        waiting = "vllm:num_requests_waiting_by_reason"
        assert scrape.full(waiting, reason=reason, **labels) == 0 and waiting in scrape.names
    for reason, outcome in _OUTCOMES.items():
        shown = scrape.full("vllm:request_success_total", finished_reason=reason, **labels)
        assert shown == scrape("requests_total", outcome=outcome)


def test_kv_cache_usage_under_vllms_name_is_the_share_of_used_blocks(server: RunningServer) -> None:
    hog = {"model": MODEL, "prompt": "Once", "max_tokens": 50_000, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=hog | {"ignore_eos": True}) as stream:
        events = stream.iter_raw()
        next(events)
        scrape = Scrape.of(server)
        used, idle, free = (scrape(f"kv_{name}_blocks") for name in ("used", "idle", "free"))
        shown = scrape.full("vllm:kv_cache_usage_perc", model_name=MODEL, engine="0")
        assert shown == used / (used + idle + free) > 0
    server.wait_until_idle()


def test_kv_cache_usage_is_that_of_the_fullest_pool() -> None:
    metrics = Metrics("model", has_vllm_names=True)
    metrics._stats = metrics.stats._replace(
        groups=(
            GroupBlocks(None, num_used=10, num_evictable=0, num_free=90),
            GroupBlocks(512, num_used=30, num_evictable=10, num_free=0),
        )
    )
    scrape = Scrape(metrics.text().decode())
    assert scrape("kv_cache_usage_ratio") == 0.75
    assert scrape.full("vllm:kv_cache_usage_perc", model_name="model", engine="0") == 0.75


def test_without_the_flag_there_are_only_our_names() -> None:
    names = Scrape(Metrics("model").text().decode()).names
    assert {name.partition("_")[0] for name in names} == {"penstock", "process", "python"}

"""The dashboard's queries and panels; `make dashboard` writes penstock.json from them.

Every query uses the metrics of /metrics alone and none of our recording rules. `make test-ops`
runs each of them on a real Prometheus, and a test compares penstock.json with this module.
"""

import json
import sys

from tests.ops.dashboard.panels import (
    Panel,
    Query,
    Row,
    bars,
    choice_variable,
    dashboard,
    datasource_variable,
    heatmap,
    label_variable,
    scatter,
    shares,
    stat,
    table,
    timeseries,
)

# The selected servers. Names with a dollar sign are the dashboard's variables.
_CHOSEN = 'job=~"$job",instance=~"$instance"'
# All are upper bounds of buckets, so that the share within a limit is exact, not interpolated.
TTFT_LIMITS = {"100 ms": "0.1", "200 ms": "0.2", "500 ms": "0.5"} | {
    f"{seconds} s": f"{seconds}.0" for seconds in (1, 2, 5, 10)
}
TPOT_LIMITS = {f"{ms} ms": f"{ms / 1000:g}" for ms in (5, 10, 20, 30, 50, 100, 200)}
_BANDWIDTH = "bandwidth_bytes_per_second"
# By patterns of legends.
_CLASS_COLORS = {"^decode": "green", "^mixed": "yellow", "^prefill": "blue", "^all": "purple"}
_OUTCOME_COLORS = {
    "stop": "green",
    "length": "blue",
    "abandoned": "yellow",
    "failed": "red",
    "refused": "orange",
}
_STATUS_COLORS = {"^2": "green", "^4": "orange", "^5": "red"}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def build() -> Panel:
    return dashboard(
        "penstock",
        "Penstock",
        "Health, load, and the distance from the hardware's limit.",
        _variables(),
        [
            Row("Overview", _overview()),
            Row("Latency", _latency()),
            Row("Throughput", _throughput()),
            Row("Saturation", _saturation()),
            Row("Roofline", _roofline()),
            Row("Predictions and targets", _targets()),
            Row("Prefix cache", _cache()),
            Row("Workload", _workload()),
            Row("Engine and host", _engine()),
        ],
    )


def main() -> None:
    json.dump(build(), sys.stdout, indent=1)
    print()


def _variables() -> list[Panel]:
    models = 'penstock_model_info{job=~"$job"}'
    instances = 'penstock_model_info{job=~"$job",name=~"$model"}'
    return [
        datasource_variable(),
        label_variable("job", "Job", "label_values(penstock_build_info, job)"),
        label_variable("model", "Model", f"label_values({models}, name)"),
        label_variable("instance", "Instance", f"label_values({instances}, instance)"),
        choice_variable("ttft_slo", "TTFT limit", TTFT_LIMITS, "2 s"),
        choice_variable("tpot_slo", "TPOT limit", TPOT_LIMITS, "50 ms"),
    ]


def _series(name: str, labels: str = "") -> str:
    return f"penstock_{name}{{{_CHOSEN}{',' if labels else ''}{labels}}}"


def _rate(name: str, labels: str = "", by: str = "") -> str:
    """Per second, summed over the selected servers except for the labels in `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({_series(name, labels)}[$__rate_interval]))"


def _total(name: str) -> str:
    return f"sum({_series(name)})"


def _quantile(share: float, name: str, by: str = "") -> str:
    le = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {_rate(f'{name}_bucket', by=le)})"


def _quantiles(name: str) -> list[Query]:
    return [Query(_quantile(share, name), legend) for legend, share in _QUANTILES.items()]


def _mean(name: str) -> str:
    return f"{_rate(f'{name}_sum')} / {_rate(f'{name}_count')}"


def _buckets(name: str) -> Query:
    """The increase of each bucket, for a heatmap."""
    counts = f"increase({_series(f'{name}_bucket')}[$__rate_interval])"
    return Query(f"sum by (le) ({counts})", "{{le}}", format="heatmap")


def _within(name: str, limit: str) -> str:
    good = _rate(f"{name}_bucket", f'le="{limit}"')
    return f"{good} / {_rate(f'{name}_count')}"


def _share_5xx() -> str:
    # `or`: before the first such response its series does not exist, and the share is 0.
    errors = _rate("http_responses_total", 'status=~"5.."')
    return f"({errors} or vector(0)) / {_rate('http_responses_total')}"


def _kv_share() -> str:
    blocks = " + ".join(_total(f"kv_{state}_blocks") for state in ("used", "idle", "free"))
    return f"{_total('kv_used_blocks')} / ({blocks})"


def _hit_share() -> str:
    return f"{_rate('prefix_hit_tokens_total')} / {_rate('prefix_query_tokens_total')}"


def _by_best_peak(name: str, labels: str = "") -> str:
    """The value for the datasheet's peak, or for the measured one if the datasheet has none."""
    listed = _series(name, f'{labels}peak="datasheet"')
    measured = _series(name, f'{labels}peak="measured"')
    return f"({listed} or ignoring (peak) {measured})"


def _utilization_of(resource: str) -> str:
    ratio = _by_best_peak(f"model_{resource}_utilization_ratio", 'class="all",')
    return f"avg{ratio}"


def _overview() -> list[Panel]:
    high_share = [(0.9, "orange"), (0.97, "red")]
    slo_steps = [(0.0, "red"), (0.9, "orange"), (0.99, "green")]
    return [
        stat(
            "Servers up",
            "Selected targets that Prometheus can scrape.",
            "short",
            Query(f"sum(up{{{_CHOSEN}}})"),
        ),
        stat(
            "Requests",
            "Accepted requests that finished, per second.",
            "reqps",
            Query(_rate("requests_total")),
        ),
        stat(
            "Output tokens / s",
            "Sampled tokens per second.",
            "short",
            Query(_rate("generated_tokens_total")),
        ),
        stat(
            "Prompt tokens / s",
            "Prompt tokens of accepted requests, per second.",
            "short",
            Query(_rate("prompt_tokens_total")),
        ),
        stat(
            "TTFT p95",
            "Time from receiving a request to sending its first token, 95th percentile.",
            "s",
            Query(_quantile(0.95, "time_to_first_token_seconds")),
        ),
        stat(
            "TPOT p95",
            "Mean time per token after the first of a request, 95th percentile.",
            "s",
            Query(_quantile(0.95, "time_per_output_token_seconds")),
        ),
        stat(
            "TTFT within limit",
            "Share of requests whose TTFT is within the selected limit.",
            "percentunit",
            Query(_within("time_to_first_token_seconds", "$ttft_slo")),
            slo_steps,
        ),
        stat(
            "TPOT within limit",
            "Share of requests whose TPOT is within the selected limit.",
            "percentunit",
            Query(_within("time_per_output_token_seconds", "$tpot_slo")),
            slo_steps,
        ),
        stat(
            "MBU",
            "Bytes that the steps must read / step time / peak bandwidth of the memory.",
            "percentunit",
            Query(_utilization_of("bandwidth")),
        ),
        stat("Running", "Running sequences.", "short", Query(_total("running_sequences"))),
        stat(
            "Waiting",
            "Sequences in the queue.",
            "short",
            Query(_total("waiting_sequences")),
            [(1, "orange"), (100, "red")],
        ),
        stat(
            "KV in use",
            "Share of the KV blocks that running sequences use.",
            "percentunit",
            Query(_kv_share()),
            high_share,
        ),
        stat(
            "Prefix hits",
            "Share of the looked-up prompt tokens that were in the prefix cache.",
            "percentunit",
            Query(_hit_share()),
        ),
        stat(
            "Preemptions / s",
            "Sequences returned to the queue for lack of KV blocks, per second.",
            "short",
            Query(_rate("preemptions_total")),
            [(0.1, "orange"), (1, "red")],
        ),
        stat(
            "Server errors",
            "Share of HTTP responses with a status of 500 or higher.",
            "percentunit",
            Query(_share_5xx()),
            [(0.001, "orange"), (0.02, "red")],
        ),
        stat(
            "Engine idle",
            "Share of the time without a running step.",
            "percentunit",
            Query(f"avg({_series('engine_idle_ratio')})"),
        ),
    ]


def _latency() -> list[Panel]:
    phases = ("queue", "prefill", "decode")
    means = [Query(_mean(f"{phase}_time_seconds"), phase) for phase in phases]
    return [
        timeseries(
            "Time to first token",
            "Time from receiving a request to sending its first token.",
            "s",
            *_quantiles("time_to_first_token_seconds"),
        ),
        timeseries(
            "Time per output token",
            "(last token - first token) / (output tokens - 1), for each request.",
            "s",
            *_quantiles("time_per_output_token_seconds"),
        ),
        timeseries(
            "Inter-token latency",
            "Each gap between two tokens; its tail is visible to users as a stall.",
            "s",
            *_quantiles("inter_token_latency_seconds"),
        ),
        heatmap(
            "Time to first token, all requests",
            "Number of requests in each bucket.",
            "s",
            _buckets("time_to_first_token_seconds"),
        ),
        heatmap(
            "Time per output token, all requests",
            "Number of requests in each bucket.",
            "s",
            _buckets("time_per_output_token_seconds"),
        ),
        heatmap(
            "Inter-token latency, all gaps",
            "Number of gaps in each bucket.",
            "s",
            _buckets("inter_token_latency_seconds"),
        ),
        timeseries(
            "Request latency",
            "Time from receiving a request to its last token.",
            "s",
            *_quantiles("request_latency_seconds"),
        ),
        timeseries(
            "Request time, by phase",
            "Means: waiting for the first step, first step to first token, first to last token.",
            "s",
            *means,
            is_stacked=True,
        ),
        timeseries(
            "Within the limits",
            "Share of requests within the selected TTFT and TPOT limits.",
            "percentunit",
            Query(_within("time_to_first_token_seconds", "$ttft_slo"), "TTFT"),
            Query(_within("time_per_output_token_seconds", "$tpot_slo"), "TPOT"),
            maximum=1,
        ),
    ]


def _throughput() -> list[Panel]:
    accepted, drafts, rows = (
        _rate(f"spec_decode_{name}_total", by="source")
        for name in ("accepted_tokens", "draft_tokens", "drafts")
    )
    at, reached = (
        _rate(f"spec_decode_{name}_tokens_per_pos_total", by="position")
        for name in ("accepted", "reached")
    )
    return [
        timeseries(
            "Tokens per second",
            "Output tokens, and prompt tokens by the source of their keys and values.",
            "short",
            Query(_rate("generated_tokens_total"), "output"),
            Query(
                f"{_rate('prompt_tokens_total')} - {_rate('cached_prompt_tokens_total')}",
                "prompt, computed",
            ),
            Query(_rate("cached_prompt_tokens_total"), "prompt, cached"),
            Query(_rate("recomputed_tokens_total"), "recomputed"),
        ),
        timeseries(
            "Finished requests, by outcome",
            "abandoned: the client disconnected. failed: the response was an error.",
            "reqps",
            Query(_rate("requests_total", by="outcome"), "{{outcome}}"),
            is_stacked=True,
            colors=_OUTCOME_COLORS,
        ),
        timeseries(
            "HTTP responses, by status",
            "429: the queue is full. 503: the server is loading or draining.",
            "reqps",
            Query(_rate("http_responses_total", by="status"), "{{status}}"),
            is_stacked=True,
            colors=_STATUS_COLORS,
        ),
        timeseries(
            "Drafts accepted, by source",
            "Share of the verified drafts of next tokens that were accepted, by where they were "
            "found: what a step gives without another.",
            "percentunit",
            Query(f"{accepted} / ({drafts} > 0)", "{{source}}"),
        ),
        timeseries(
            "Tokens per row with drafts, by source",
            "Output tokens of a row of a step that had drafts: 1 where none was accepted.",
            "short",
            Query(f"1 + {accepted} / ({rows} > 0)", "{{source}}"),
        ),
        timeseries(
            "Drafts accepted, by position",
            "Share of the drafts at each place of a row that were accepted, of those all before "
            "which were: of all sources together, the first is 0.",
            "percentunit",
            Query(f"{at} / ({reached} > 0)", "{{position}}"),
        ),
    ]


def _saturation() -> list[Panel]:
    blocks = [Query(_total(f"kv_{state}_blocks"), state) for state in ("used", "idle", "free")]
    wait = _quantile(0.99, "queue_time_seconds")
    tokens = f"sum({_series('kv_used_blocks')} * {_series('kv_block_size_tokens')})"
    return [
        timeseries(
            "Running and waiting",
            "A lasting queue means that the load exceeds the servers' capacity.",
            "short",
            Query(_total("running_sequences"), "running"),
            Query(_total("waiting_sequences"), "waiting"),
        ),
        timeseries(
            "Queue time",
            "Time from receiving a request to its first step.",
            "s",
            Query(_quantile(0.5, "queue_time_seconds"), "p50"),
            Query(wait, "p99"),
        ),
        heatmap(
            "Queue time, all requests",
            "Number of requests in each bucket.",
            "s",
            _buckets("queue_time_seconds"),
        ),
        timeseries(
            "KV blocks",
            "used: by a sequence. idle: cached and evictable. free: empty.",
            "short",
            *blocks,
            is_stacked=True,
        ),
        timeseries(
            "KV tokens in use",
            "Token slots of the used blocks, including unfilled slots.",
            "short",
            Query(tokens, "tokens"),
        ),
        timeseries(
            "Preemptions",
            "Sequences returned to the queue for lack of KV blocks, and the tokens recomputed.",
            "short",
            Query(_rate("preemptions_total"), "preemptions per second"),
            Query(_rate("recomputed_tokens_total"), "recomputed tokens per second"),
            right={"^recomputed": "short"},
        ),
        heatmap(
            "Batch size",
            "Sequences in a step: number of steps in each bucket.",
            "short",
            _buckets("batch_size_sequences"),
            width=12,
        ),
        heatmap(
            "Tokens per step",
            "Prefill chunks and decodes together: number of steps in each bucket.",
            "short",
            _buckets("step_tokens"),
            width=12,
        ),
    ]


def _roofline() -> list[Panel]:
    step_time = _rate("step_time_seconds_sum", by="class")
    peaks = [_by_best_peak(f"peak_{name}") for name in ("flops_per_second", _BANDWIDTH)]
    ridge = " / ".join(f"max{peak}" for peak in peaks)
    # `> 0` drops moments without a step, since the x of a trend panel must not have gaps.
    batch = Query(f"{_mean('batch_size_sequences')} > 0", "sequences in a step")
    return [
        timeseries(
            "Memory bandwidth utilization (MBU)",
            "Bytes that the steps must read / step time / peak bandwidth. Decode is bound by it.",
            "percentunit",
            _utilization("bandwidth"),
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Model FLOPs utilization (MFU)",
            "Operations of the steps / step time / peak rate. Prefill is bound by it.",
            "percentunit",
            _utilization("flops"),
            colors=_CLASS_COLORS,
        ),
        scatter(
            "MBU and MFU, by batch size",
            "Each point is a moment: small batches are bound by memory, large ones by compute.",
            "percentunit",
            batch,
            Query(_utilization_of("bandwidth"), "MBU"),
            Query(_utilization_of("flops"), "MFU"),
        ),
        timeseries(
            "Bytes per second of step time",
            "Bytes that the steps must read, and both peaks.",
            "Bps",
            Query(f"{_rate('model_bytes_total', by='class')} / {step_time}", "{{class}}"),
            _peak(_BANDWIDTH),
            limits=["^peak"],
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Operations per second of step time",
            "Operations of the steps, and the peak.",
            "flops",
            Query(f"{_rate('model_flops_total', by='class')} / {step_time}", "{{class}}"),
            _peak("flops_per_second"),
            limits=["^peak"],
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Operations per byte",
            "Below the ridge point a step is bound by memory, above it by compute.",
            "short",
            Query(
                f"{_rate('model_flops_total', by='class')} / "
                f"{_rate('model_bytes_total', by='class')}",
                "{{class}}",
            ),
            Query(ridge, "ridge"),
            limits=["^ridge"],
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Step time, by class",
            "decode: no prompt tokens. prefill: only prompt tokens. mixed: both.",
            "s",
            Query(_quantile(0.5, "step_time_seconds", by="class"), "{{class}} p50"),
            Query(_quantile(0.99, "step_time_seconds", by="class"), "{{class}} p99"),
        ),
        heatmap(
            "Step time, all steps",
            "Number of steps in each bucket.",
            "s",
            _buckets("step_time_seconds"),
        ),
        timeseries(
            "Engine time, by class",
            "Share of the time in steps of each class, per server; the rest is idle.",
            "percentunit",
            Query(f"{step_time} / {_num_servers()}", "{{class}}"),
            is_stacked=True,
            colors=_CLASS_COLORS,
        ),
    ]


def _targets() -> list[Panel]:
    steps = _rate("predicted_steps_total", by="class")
    predicted = _rate("step_predicted_seconds_total", by="class")
    measured = _rate("step_measured_seconds_total", by="class")
    return [
        timeseries(
            "Step time, predicted and measured",
            "Mean time of a step, by what it ran: as predicted before it ran, and as it was. "
            "Targets are met by these predictions.",
            "s",
            Query(f"{predicted} / {steps}", "{{class}} predicted"),
            Query(f"{measured} / {steps}", "{{class}} measured"),
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Error of predicted step times",
            "Mean relative error of the latest steps.",
            "percentunit",
            Query(f"max by (class) ({_series('step_prediction_error_ratio')})", "{{class}}"),
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "TTFT, predicted and its error",
            "Of requests with a target: the TTFT expected at their arrival, and its error.",
            "s",
            Query(_quantile(0.5, "predicted_time_to_first_token_seconds"), "predicted p50"),
            Query(_quantile(0.99, "predicted_time_to_first_token_seconds"), "predicted p99"),
            Query(_quantile(0.5, "ttft_prediction_error_seconds"), "error p50"),
        ),
        timeseries(
            "Targets, by outcome",
            "Answers a second that met or missed their target, and requests refused because of it.",
            "reqps",
            Query(_rate("slo_attained_total", by="slo, outcome"), "{{slo}} {{outcome}}"),
            colors={"met$": "green", "missed$": "red", "refused$": "orange"},
        ),
        timeseries(
            "Fairness among keys",
            "Jain's index of what was computed for the keys that have to wait, under "
            "--scheduling-policy fair; 1 is equal.",
            "percentunit",
            Query(_series("fairness_jain_index"), "{{instance}}"),
        ),
        timeseries(
            "Engine restarts",
            "Engine processes that were replaced in the last hour, by what ended them, and "
            "requests that are not run again because the engine ended twice with them.",
            "short",
            Query(
                f"sum by (cause) (increase({_series('engine_restarts_total')}[1h]))", "{{cause}}"
            ),
            Query(
                f"sum(increase({_series('quarantined_requests_total')}[1h]))", "requests given up"
            ),
        ),
    ]


def _num_servers() -> str:
    return f"scalar(count({_series('engine_idle_ratio')}))"


def _utilization(resource: str) -> Query:
    ratio = _series(f"model_{resource}_utilization_ratio")
    return Query(f"avg by (class, peak) ({ratio})", "{{class}}, of the {{peak}} peak")


def _peak(resource: str) -> Query:
    return Query(f"max by (peak) ({_series(f'peak_{resource}')})", "peak ({{peak}})")


def _cache() -> list[Panel]:
    return [
        timeseries(
            "Hit rate",
            "Share of the looked-up prompt tokens that were in the prefix cache, in full blocks.",
            "percentunit",
            Query(_hit_share(), "hits"),
            maximum=1,
        ),
        timeseries(
            "Prefix lookups",
            "Prompt tokens per second. A preempted sequence is looked up again.",
            "short",
            Query(_rate("prefix_hit_tokens_total"), "hits"),
            Query(
                f"{_rate('prefix_query_tokens_total')} - {_rate('prefix_hit_tokens_total')}",
                "misses",
            ),
            is_stacked=True,
        ),
        timeseries(
            "Evictable blocks",
            "Cached blocks that no running sequence uses. At 0, no prefix stays cached.",
            "short",
            Query(_total("kv_idle_blocks"), "idle"),
        ),
    ]


def _workload() -> list[Panel]:
    outcomes = f"increase({_series('requests_total')}[$__range])"
    return [
        heatmap(
            "Prompt lengths",
            "Tokens in a prompt: number of requests in each bucket.",
            "short",
            _buckets("request_prompt_tokens"),
        ),
        heatmap(
            "Output lengths",
            "Tokens in an output: number of requests in each bucket.",
            "short",
            _buckets("request_generated_tokens"),
        ),
        shares(
            "Outcomes",
            "Finished requests over the selected time range.",
            "short",
            Query(f"sum by (outcome) ({outcomes})", "{{outcome}}", is_instant=True),
            _OUTCOME_COLORS,
        ),
        timeseries(
            "Prompt length",
            "Tokens.",
            "short",
            *_quantiles("request_prompt_tokens"),
            Query(_mean("request_prompt_tokens"), "mean"),
            width=12,
        ),
        timeseries(
            "Output length",
            "Tokens.",
            "short",
            *_quantiles("request_generated_tokens"),
            Query(_mean("request_generated_tokens"), "mean"),
            width=12,
        ),
    ]


def _engine() -> list[Panel]:
    host = f"{{{_CHOSEN}}}"
    cpu = f"rate(process_cpu_seconds_total{host}[$__rate_interval])"
    engine_cpu = f"rate({_series('engine_process_cpu_seconds_total')}[$__rate_interval])"
    busy = f"rate({_series('engine_busy_seconds_total')}[$__rate_interval])"
    collections = f"rate(python_gc_collections_total{host}[$__rate_interval])"
    return [
        timeseries(
            "Engine busy",
            "Share of the time with a running step. If it is low while requests wait, look at the "
            "server process's CPU.",
            "percentunit",
            Query(f"1 - {_series('engine_idle_ratio')}", "{{instance}}, last seconds"),
            Query(busy, "{{instance}}, by the counter"),
        ),
        timeseries(
            "Seconds since the last step",
            "With requests to run it stays near the step time; it grows when the engine is stuck.",
            "s",
            Query(_series("engine_last_step_age_seconds"), "{{instance}}"),
        ),
        bars(
            "Start-up, by phase",
            "Duration of each phase of the last start.",
            "s",
            Query(f"max by (phase) ({_series('startup_seconds')})", "{{phase}}"),
        ),
        timeseries(
            "Processes: CPU",
            "Cores that the server process and the engine process use.",
            "short",
            Query(cpu, "{{instance}} server"),
            Query(engine_cpu, "{{instance}} engine"),
        ),
        timeseries(
            "Processes: memory",
            "Resident memory of the server process and of the engine process, which on a CPU holds "
            "the weights too. Right axis: open files of the server process.",
            "bytes",
            Query(f"process_resident_memory_bytes{host}", "{{instance}} server"),
            Query(_series("engine_process_resident_memory_bytes"), "{{instance}} engine"),
            Query(f"process_open_fds{host}", "{{instance}} open files"),
            right={"open files$": "short"},
        ),
        timeseries(
            "Server process: garbage collections",
            "Collections per second, by generation.",
            "short",
            Query(f"sum by (generation) ({collections})", "generation {{generation}}"),
        ),
        table(
            "Models",
            "The model that each server serves.",
            Query(_series("model_info"), format="table", is_instant=True),
        ),
        table(
            "Builds",
            "The version of each server.",
            Query(_series("build_info"), format="table", is_instant=True),
        ),
    ]


if __name__ == "__main__":
    main()

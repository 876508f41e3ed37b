"""`python -m penstock.configs.grafana.dashboard > configs/grafana/penstock.json`: the dashboard,
from its queries.

Every figure is computed from /metrics alone, so it needs none of our recording rules. `make
test-ops` asks a real Prometheus every query here, and a test compares the file with this module.
"""

import json
import sys

from penstock.configs.grafana.panels import (
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

# The chosen servers. Dollar names are the dashboard's variables.
_CHOSEN = 'job=~"$job",instance=~"$instance"'
# Both are upper bounds of buckets: a share within the limit is then counted, not interpolated.
TTFT_LIMITS = {"100 ms": "0.1", "200 ms": "0.2", "500 ms": "0.5"} | {
    f"{seconds} s": f"{seconds}.0" for seconds in (1, 2, 5, 10)
}
TPOT_LIMITS = {f"{ms} ms": f"{ms / 1000:g}" for ms in (5, 10, 20, 30, 50, 100, 200)}
_BANDWIDTH = "bandwidth_bytes_per_second"
# Of legends, as patterns.
_CLASS_COLORS = {"^decode": "green", "^mixed": "yellow", "^prefill": "blue", "^all": "purple"}
_OUTCOME_COLORS = {"stop": "green", "length": "blue", "abandoned": "yellow", "failed": "red"}
_STATUS_COLORS = {"^2": "green", "^4": "orange", "^5": "red"}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def build() -> Panel:
    return dashboard(
        "penstock",
        "Penstock",
        "Is it well, is it full, and how far is it from the hardware's limit?",
        _variables(),
        [
            Row("Overview", _overview()),
            Row("Latency", _latency()),
            Row("Throughput", _throughput()),
            Row("Saturation", _saturation()),
            Row("Roofline", _roofline()),
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
    """Per second, of all chosen servers together, apart by the labels named in `by`."""
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
    """What a heatmap draws."""
    counts = f"increase({_series(f'{name}_bucket')}[$__rate_interval])"
    return Query(f"sum by (le) ({counts})", "{{le}}", format="heatmap")


def _within(name: str, limit: str) -> str:
    good = _rate(f"{name}_bucket", f'le="{limit}"')
    return f"{good} / {_rate(f'{name}_count')}"


def _share_5xx() -> str:
    # `or`: without one such response there is no such series, and the share is 0.
    errors = _rate("http_responses_total", 'status=~"5.."')
    return f"({errors} or vector(0)) / {_rate('http_responses_total')}"


def _kv_share() -> str:
    blocks = " + ".join(_total(f"kv_{state}_blocks") for state in ("used", "idle", "free"))
    return f"{_total('kv_used_blocks')} / ({blocks})"


def _hit_share() -> str:
    return f"{_rate('prefix_hit_tokens_total')} / {_rate('prefix_query_tokens_total')}"


def _by_best_peak(name: str, labels: str = "") -> str:
    """By the datasheet's peak; where it is not listed, by the measured one."""
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
            "Servers that answer",
            "How many of the chosen targets Prometheus can scrape.",
            "short",
            Query(f"sum(up{{{_CHOSEN}}})"),
        ),
        stat(
            "Requests",
            "Accepted requests that ended, a second.",
            "reqps",
            Query(_rate("requests_total")),
        ),
        stat(
            "Output tokens / s",
            "Tokens sampled, a second.",
            "short",
            Query(_rate("generated_tokens_total")),
        ),
        stat(
            "Prompt tokens / s",
            "Prompt tokens of accepted requests, a second.",
            "short",
            Query(_rate("prompt_tokens_total")),
        ),
        stat(
            "TTFT p95",
            "Request received to first token sent, 95 of 100 are quicker.",
            "s",
            Query(_quantile(0.95, "time_to_first_token_seconds")),
        ),
        stat(
            "TPOT p95",
            "Mean time of a token after the first, 95 of 100 requests are quicker.",
            "s",
            Query(_quantile(0.95, "time_per_output_token_seconds")),
        ),
        stat(
            "TTFT within limit",
            "Share of requests whose first token came within the chosen limit.",
            "percentunit",
            Query(_within("time_to_first_token_seconds", "$ttft_slo")),
            slo_steps,
        ),
        stat(
            "TPOT within limit",
            "Share of requests whose tokens came as fast as the chosen limit.",
            "percentunit",
            Query(_within("time_per_output_token_seconds", "$tpot_slo")),
            slo_steps,
        ),
        stat(
            "MBU",
            "Bytes the steps had to read, of what the memory could deliver meanwhile.",
            "percentunit",
            Query(_utilization_of("bandwidth")),
        ),
        stat("Running", "Sequences in a slot.", "short", Query(_total("running_sequences"))),
        stat(
            "Waiting",
            "Sequences in the queue.",
            "short",
            Query(_total("waiting_sequences")),
            [(1, "orange"), (100, "red")],
        ),
        stat(
            "KV in use",
            "Share of the KV blocks that running sequences hold.",
            "percentunit",
            Query(_kv_share()),
            high_share,
        ),
        stat(
            "Prefix hits",
            "Share of the prompt tokens looked up that were found in the cache.",
            "percentunit",
            Query(_hit_share()),
        ),
        stat(
            "Preemptions / s",
            "Sequences sent back to the queue for want of KV blocks, a second.",
            "short",
            Query(_rate("preemptions_total")),
            [(0.1, "orange"), (1, "red")],
        ),
        stat(
            "Server errors",
            "Share of the HTTP responses with a status of 500 or more.",
            "percentunit",
            Query(_share_5xx()),
            [(0.001, "orange"), (0.02, "red")],
        ),
        stat(
            "Engine idle",
            "Share of the time in which no step ran.",
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
            "Request received by the server to its first token sent.",
            "s",
            *_quantiles("time_to_first_token_seconds"),
        ),
        timeseries(
            "Time per output token",
            "(last token - first token) / (output tokens - 1), of one request.",
            "s",
            *_quantiles("time_per_output_token_seconds"),
        ),
        timeseries(
            "Inter-token latency",
            "Each gap between two tokens; its tail is what a reader sees as a stall.",
            "s",
            *_quantiles("inter_token_latency_seconds"),
        ),
        heatmap(
            "Time to first token, all requests",
            "How many requests fell into each bucket.",
            "s",
            _buckets("time_to_first_token_seconds"),
        ),
        heatmap(
            "Time per output token, all requests",
            "How many requests fell into each bucket.",
            "s",
            _buckets("time_per_output_token_seconds"),
        ),
        heatmap(
            "Inter-token latency, all gaps",
            "How many gaps fell into each bucket.",
            "s",
            _buckets("inter_token_latency_seconds"),
        ),
        timeseries(
            "Request latency",
            "Request received to its last token.",
            "s",
            *_quantiles("request_latency_seconds"),
        ),
        timeseries(
            "Where the time goes",
            "Means: waiting for a first step, first step to first token, first to last token.",
            "s",
            *means,
            is_stacked=True,
        ),
        timeseries(
            "Within the limits",
            "Share of requests within the TTFT and TPOT limits chosen above.",
            "percentunit",
            Query(_within("time_to_first_token_seconds", "$ttft_slo"), "TTFT"),
            Query(_within("time_per_output_token_seconds", "$tpot_slo"), "TPOT"),
            maximum=1,
        ),
    ]


def _throughput() -> list[Panel]:
    return [
        timeseries(
            "Tokens a second",
            "Output tokens, and prompt tokens by where their keys and values came from.",
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
            "Requests ended, by outcome",
            "abandoned: the client left. failed: an error was its answer.",
            "reqps",
            Query(_rate("requests_total", by="outcome"), "{{outcome}}"),
            is_stacked=True,
            colors=_OUTCOME_COLORS,
        ),
        timeseries(
            "HTTP responses, by status",
            "429 is a full queue, 503 is loading or draining.",
            "reqps",
            Query(_rate("http_responses_total", by="status"), "{{status}}"),
            is_stacked=True,
            colors=_STATUS_COLORS,
        ),
    ]


def _saturation() -> list[Panel]:
    blocks = [Query(_total(f"kv_{state}_blocks"), state) for state in ("used", "idle", "free")]
    wait = _quantile(0.99, "queue_time_seconds")
    tokens = f"sum({_series('kv_used_blocks')} * {_series('kv_block_size_tokens')})"
    return [
        timeseries(
            "Running and waiting",
            "A queue that stays means that the load is more than the servers carry.",
            "short",
            Query(_total("running_sequences"), "running"),
            Query(_total("waiting_sequences"), "waiting"),
        ),
        timeseries(
            "Queue time",
            "Request received to its first step.",
            "s",
            Query(_quantile(0.5, "queue_time_seconds"), "p50"),
            Query(wait, "p99"),
        ),
        heatmap(
            "Queue time, all requests",
            "How many requests fell into each bucket.",
            "s",
            _buckets("queue_time_seconds"),
        ),
        timeseries(
            "KV blocks",
            "used: held by a sequence. idle: cached, given up when needed. free: empty.",
            "short",
            *blocks,
            is_stacked=True,
        ),
        timeseries(
            "KV tokens in use",
            "Places of tokens in the blocks that sequences hold, the last block's rest included.",
            "short",
            Query(tokens, "tokens"),
        ),
        timeseries(
            "Preemptions",
            "Sequences sent back for want of blocks, and the tokens computed again for them.",
            "short",
            Query(_rate("preemptions_total"), "preemptions a second"),
            Query(_rate("recomputed_tokens_total"), "tokens recomputed a second"),
            right={"^tokens": "short"},
        ),
        heatmap(
            "Batch size",
            "Sequences in a step: how many steps fell into each bucket.",
            "short",
            _buckets("batch_size_sequences"),
            width=12,
        ),
        heatmap(
            "Tokens of a step",
            "Prefill chunks and decodes together: how many steps fell into each bucket.",
            "short",
            _buckets("step_tokens"),
            width=12,
        ),
    ]


def _roofline() -> list[Panel]:
    step_time = _rate("step_time_seconds_sum", by="class")
    peaks = [_by_best_peak(f"peak_{name}") for name in ("flops_per_second", _BANDWIDTH)]
    ridge = " / ".join(f"max{peak}" for peak in peaks)
    # `> 0`: moments without a step are left out; a trend's x may not have gaps.
    batch = Query(f"{_mean('batch_size_sequences')} > 0", "sequences in a step")
    return [
        timeseries(
            "Memory bandwidth utilization (MBU)",
            "Bytes that the steps must read / their time / peak bandwidth. Decode lives here.",
            "percentunit",
            _utilization("bandwidth"),
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Model FLOPs utilization (MFU)",
            "Operations that the steps must do / their time / peak rate. Prefill lives here.",
            "percentunit",
            _utilization("flops"),
            colors=_CLASS_COLORS,
        ),
        scatter(
            "MBU and MFU against the batch",
            "Each point is a moment: small batches are bound by memory, large ones by compute.",
            "percentunit",
            batch,
            Query(_utilization_of("bandwidth"), "MBU"),
            Query(_utilization_of("flops"), "MFU"),
        ),
        timeseries(
            "Bytes a second, while stepping",
            "What the steps had to read, per second of their own time, against both peaks.",
            "Bps",
            Query(f"{_rate('model_bytes_total', by='class')} / {step_time}", "{{class}}"),
            _peak(_BANDWIDTH),
            limits=["^peak"],
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Operations a second, while stepping",
            "What the steps had to compute, per second of their own time, against the peak.",
            "flops",
            Query(f"{_rate('model_flops_total', by='class')} / {step_time}", "{{class}}"),
            _peak("flops_per_second"),
            limits=["^peak"],
            colors=_CLASS_COLORS,
        ),
        timeseries(
            "Operations per byte",
            "Below the ridge a step is bound by memory, above it by compute.",
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
            "decode: no prompt tokens; prefill: nothing else; mixed: both.",
            "s",
            Query(_quantile(0.5, "step_time_seconds", by="class"), "{{class}} p50"),
            Query(_quantile(0.99, "step_time_seconds", by="class"), "{{class}} p99"),
        ),
        heatmap(
            "Step time, all steps",
            "How many steps fell into each bucket.",
            "s",
            _buckets("step_time_seconds"),
        ),
        timeseries(
            "What the engine's time is spent on",
            "Seconds of steps of each class in a second, a server; the rest is idle.",
            "percentunit",
            Query(f"{step_time} / {_num_servers()}", "{{class}}"),
            is_stacked=True,
            colors=_CLASS_COLORS,
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
            "Share found",
            "Of the prompt tokens looked up in the prefix cache; blocks are found whole.",
            "percentunit",
            Query(_hit_share(), "found"),
            maximum=1,
        ),
        timeseries(
            "Prompt tokens looked up",
            "A second. A preempted sequence is looked up again.",
            "short",
            Query(_rate("prefix_hit_tokens_total"), "found"),
            Query(
                f"{_rate('prefix_query_tokens_total')} - {_rate('prefix_hit_tokens_total')}",
                "not found",
            ),
            is_stacked=True,
        ),
        timeseries(
            "Cached blocks that nobody holds",
            "What the cache can keep beside the running sequences; at 0, prefixes are forgotten.",
            "short",
            Query(_total("kv_idle_blocks"), "idle"),
        ),
    ]


def _workload() -> list[Panel]:
    outcomes = f"increase({_series('requests_total')}[$__range])"
    return [
        heatmap(
            "Prompt lengths",
            "Tokens of a prompt: how many requests fell into each bucket.",
            "short",
            _buckets("request_prompt_tokens"),
        ),
        heatmap(
            "Output lengths",
            "Tokens of an answer: how many answers fell into each bucket.",
            "short",
            _buckets("request_generated_tokens"),
        ),
        shares(
            "How requests ended",
            "Over the time shown.",
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
            "Share of the time in which a step ran. Requests wait and this is low: look at the "
            "server process's CPU.",
            "percentunit",
            Query(f"1 - {_series('engine_idle_ratio')}", "{{instance}}, last seconds"),
            Query(busy, "{{instance}}, by the counter"),
        ),
        timeseries(
            "Seconds since the last step",
            "With work open this stays near a step's time; it grows when the engine is stuck.",
            "s",
            Query(_series("engine_last_step_age_seconds"), "{{instance}}"),
        ),
        bars(
            "Start-up, by phase",
            "Seconds of each phase of the last start.",
            "s",
            Query(f"max by (phase) ({_series('startup_seconds')})", "{{phase}}"),
        ),
        timeseries(
            "Processes: CPU",
            "Cores in use by the process that speaks HTTP, and by the engine's.",
            "short",
            Query(cpu, "{{instance}} server"),
            Query(engine_cpu, "{{instance}} engine"),
        ),
        timeseries(
            "Processes: memory",
            "Resident memory of the process that speaks HTTP and of the engine's, which on a CPU "
            "holds the weights too; on the right the first one's open files.",
            "bytes",
            Query(f"process_resident_memory_bytes{host}", "{{instance}} server"),
            Query(_series("engine_process_resident_memory_bytes"), "{{instance}} engine"),
            Query(f"process_open_fds{host}", "{{instance}} open files"),
            right={"open files$": "short"},
        ),
        timeseries(
            "Server process: garbage collections",
            "A second, by generation.",
            "short",
            Query(f"sum by (generation) ({collections})", "generation {{generation}}"),
        ),
        table(
            "Models",
            "What each server serves.",
            Query(_series("model_info"), format="table", is_instant=True),
        ),
        table(
            "Builds",
            "What each server is.",
            Query(_series("build_info"), format="table", is_instant=True),
        ),
    ]


if __name__ == "__main__":
    main()

"""The outcome of a simulation, besides what a client sees: its class, memory, cost, error bars."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from statistics import fmean
from typing import Any

from penstock.engine.step.model_info import ModelInfo
from penstock.loadtest.report.figures import NUM_TIME_BINS, Lines, Series, over_time
from penstock.loadtest.report.report import ReportConfig, Summary, summarize
from penstock.loadtest.simulate.replica import StepRecord
from penstock.loadtest.simulate.simulation import Plan, Simulated, simulate
from penstock.loadtest.workload.workload import TimedRequest

# Sequences that wait longer than a step or two: as a share of the time.
_OFTEN = 0.1
# The queue's mean at the end of the arrivals, over that of their middle, when it keeps growing: a
# queue that grows evenly has 1.75 times as many in the last quarter as in the second.
_GROWS = 1.5
_PERCENT = 100.0


class RunClass(StrEnum):
    STABLE = "stable"  # requests hardly ever waited for a slot
    BACKLOGGED = "backlogged"  # they did, and the queue did not grow without end
    OVERLOADED = "overloaded"  # more came than was served: with more requests all is worse


def run_class(simulated: Simulated) -> RunClass:
    """By the queue while requests arrive."""
    results = simulated.observed.results
    last_s = max((result.sent_s for result in results), default=0.0)
    first_s = min((result.sent_s for result in results), default=0.0)
    quarters: list[list[float]] = [[], [], [], []]
    span_s = last_s - first_s
    num_waiting = num_steps = 0
    for step in simulated.all_steps:
        num_steps += 1
        num_waiting += step.num_waiting > 0
        if span_s and first_s <= step.end_s <= last_s:
            index = min(3, int(4 * (step.end_s - first_s) / span_s))
            quarters[index].append(step.num_waiting)
    if num_waiting <= _OFTEN * num_steps:
        return RunClass.STABLE
    second, last = (fmean(quarters[index] or [0.0]) for index in (1, 3))
    is_open = any(result.is_open_loop for result in results)
    # Fewer than one in twenty requests waiting at the end is a wave, and no trend.
    grows = last > _GROWS * second and last * len(simulated.steps) > len(results) / 20
    return RunClass.OVERLOADED if is_open and grows else RunClass.BACKLOGGED


def server_figures(simulated: Simulated) -> dict[str, Any]:
    """The memory of all replicas, and whether they kept up."""
    stats = simulated.stats
    num_queried = sum(each.prefix_query_tokens_total for each in stats)
    num_hit = sum(each.prefix_hit_tokens_total for each in stats)
    return {
        "run_class": run_class(simulated),
        "kv_peak": max((step.kv_usage for step in simulated.all_steps), default=0.0),
        "preemptions": sum(each.preemptions_total for each in stats),
        "prefix_hit_ratio": num_hit / num_queried if num_queried else 0.0,
        "unchecked_step_ratio": simulated.num_outside / max(1, simulated.num_steps),
    }


def _peaks(info: ModelInfo) -> tuple[float | None, float | None]:
    """Bytes and floating-point operations per second; None where a peak is unknown."""
    return (
        info.peak_bandwidth_bytes_per_s or info.measured_bandwidth_bytes_per_s,
        info.peak_flops_per_s or info.measured_flops_per_s,
    )


def summary_of(plan: Plan, simulated: Simulated, report: ReportConfig) -> Summary:
    """The keys of penstock bench, and those that only a simulation has. mbu, mfu: of all steps
    together; None where the device's peak is unknown."""
    info, steps = plan.server.info, simulated.all_steps
    busy_s = sum(step.step_s for step in steps) or 1.0
    bandwidth, flops = _peaks(info)
    duration_s = simulated.observed.duration_s
    figures = summarize(simulated.observed, report) | server_figures(simulated)
    drafts = [each for stats in simulated.stats for each in stats.drafts]
    return figures | {
        "num_draft_tokens": sum(each.num_draft_tokens_total for each in drafts),
        "num_accepted_draft_tokens": sum(each.num_accepted_tokens for each in drafts),
        "num_replicas": plan.num_replicas,
        "tensor_parallel_size": info.tensor_parallel_size,
        "pipeline_parallel_size": info.pipeline_parallel_size,
        "router": plan.router,
        "recomputed_tokens": sum(each.recomputed_tokens_total for each in simulated.stats),
        "mbu": sum(step.num_bytes for step in steps) / busy_s / bandwidth if bandwidth else None,
        "mfu": sum(step.flops for step in steps) / busy_s / flops if flops else None,
        "num_steps": len(steps),
        "step_cost_us": simulated.cpu_s / max(1, len(steps)) * 1e6,
        "speedup": duration_s * plan.num_replicas / max(simulated.cpu_s, 1e-9),
    }


def error_bars(middle: Summary, others: Sequence[Summary]) -> dict[str, tuple[float, float]]:
    """Returns the least and the most that each figure has in these runs, by key."""
    bars = {}
    for key, value in middle.items():
        if not isinstance(value, float) or key in ("step_cost_us", "speedup", "client_cpu_share"):
            continue
        values = [value, *(other[key] for other in others if isinstance(other.get(key), float))]
        if min(values) < max(values):
            bars[key] = (min(values), max(values))
    return bars


_CHANGE = 0.1


def effect_of_acceptance(plan: Plan, requests: Sequence[TimedRequest]) -> str:
    """A sentence on what is assumed of drafts, and on what the error of that would change."""
    drafts, figures = plan.server.drafts, []
    assert drafts is not None
    for more in (-_CHANGE, 0.0, _CHANGE):
        server = plan.server._replace(drafts=drafts.changed_by(more))
        observed = simulate(replace(plan, server=server), requests).observed
        figures.append(summarize(observed, ReportConfig()))
    tpots = [f"{each['median_tpot_ms'] or 0.0:.2f}" for each in figures]
    rates = [f"{each['output_throughput']:.0f}" for each in figures]
    return (
        f"drafts are assumed, {drafts}: with {_CHANGE:g} less, that, and {_CHANGE:g} more, TPOT "
        f"p50 is {', '.join(tpots)} ms, and there are {', '.join(rates)} output tokens/s"
    )


def render_outcome(summary: Summary) -> str:
    """The rows that follow the layout of penstock bench."""
    bars = summary.get("error_bars") or {}

    def share(key: str) -> str:
        value, bar = summary[key], bars.get(key)
        if value is None:
            return "-"
        shown = f" ({bar[0] * _PERCENT:.1f} to {bar[1] * _PERCENT:.1f})" if bar else ""
        return f"{value * _PERCENT:<10.1f}{shown}"

    tensor_size, num_stages = summary["tensor_parallel_size"], summary["pipeline_parallel_size"]
    rows = {
        "Run class:": summary["run_class"],
        "Replicas, router:": f"{summary['num_replicas']}, {summary['router']}",
        "Ranks of each, TP x PP:": f"{tensor_size} x {num_stages}",
        "KV blocks used at most (%):": share("kv_peak"),
        "Preemptions:": summary["preemptions"],
        "Prompt tokens from the prefix cache (%):": share("prefix_hit_ratio"),
        "Drafts verified, accepted:": f"{summary['num_draft_tokens']}, "
        f"{summary['num_accepted_draft_tokens']}",
        "MBU (%):": share("mbu"),
        "MFU (%):": share("mfu"),
        "Steps outside of the calibrated range (%):": share("unchecked_step_ratio"),
        "Simulated steps:": summary["num_steps"],
        "CPU time of a simulated step (us):": f"{summary['step_cost_us']:.1f}",
        "Times as fast as real time:": f"{summary['speedup']:.0f}",
    }
    lines = [f"{label:<40} {value}" for label, value in rows.items()]
    return "\n".join([f"{'Simulation':-^50}", *lines, "=" * 50])


def figures_over_time(plan: Plan, simulated: Simulated) -> list[Lines]:
    """MBU and MFU, blocks of keys and values, and sequences, all replicas together."""
    bandwidth, flops = _peaks(plan.server.info)
    steps = sorted(simulated.all_steps)
    if not steps:
        return []
    width = steps[-1].end_s / NUM_TIME_BINS or 1.0
    bins: list[list[StepRecord]] = [[] for _ in range(NUM_TIME_BINS)]
    for step in steps:
        bins[min(int(step.end_s / width), NUM_TIME_BINS - 1)].append(step)
    filled = [(number, each) for number, each in enumerate(bins) if each]
    xs = [(number + 0.5) * width for number, _ in filled]
    capacity_s = width * plan.num_replicas  # idle time counts

    def mean(name: str) -> list[float]:
        return [fmean(getattr(step, name) for step in each) for _, each in filled]

    def rate(name: str, peak: float) -> list[float]:
        return [sum(getattr(step, name) for step in each) / capacity_s / peak for _, each in filled]

    used = [Series(name="MBU", xs=xs, ys=rate("num_bytes", bandwidth))] if bandwidth else []
    used += [Series(name="MFU", xs=xs, ys=rate("flops", flops))] if flops else []
    running = Series(name="running", xs=xs, ys=mean("num_running"))
    waiting = Series(name="waiting", xs=xs, ys=mean("num_waiting"))
    blocks = Series(name="KV blocks", xs=xs, ys=mean("kv_usage"))
    drawn = (
        ("utilization-over-time", "MBU and MFU over time", "share of the peak", used),
        ("kv-over-time", "KV blocks in use over time", "share of the blocks", [blocks]),
        (
            "sequences-over-time",
            "Sequences of a replica over time",
            "sequences",
            [running, waiting],
        ),
    )
    return [over_time(slug, title, label, series) for slug, title, label, series in drawn if series]

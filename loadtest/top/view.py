"""Lays out what `penstock top` shows: from a history of scrapes to lines of styled text.

Knows no terminal and no clock. Every character is one column wide: text from the server is cleaned
first, so that it cannot send escape sequences to the terminal.
"""

# Why not rich: 3 % fewer lines, frames nine times as slow (measured in LOG.md).

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from penstock.loadtest.top.scrape import History, Scrape, Window

MINUTE_S = 60.0
_DASH = "-"
_CLASSES = ("decode", "prefill", "mixed")
_OUTCOMES = ("stop", "length", "failed", "abandoned")
_LATENCIES = (
    ("TTFT", "time_to_first_token_seconds"),
    ("TPOT", "time_per_output_token_seconds"),
    ("ITL", "inter_token_latency_seconds"),
    ("queue", "queue_time_seconds"),
)
# The numbers that have a sparkline, two beside each other.
_RATES = {
    "tokens/s": {"output": "generated_tokens_total", "prompt": "prompt_tokens_total"},
    "sequences": {"running": "running_sequences", "waiting": "waiting_sequences"},
}
_QUANTILES = (0.5, 0.95, 0.99)
_LABEL_WIDTH = 9
_HALF_SPARK_FROM = 60  # columns; a narrower terminal has no room for sparklines
_BOTH_SPANS_FROM = 72  # columns
_MOST_SPARK = 60


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of bars and sparklines, from empty to full."""

    spark: str
    bar: str
    track: str
    idle: str
    dot: str


UNICODE = Glyphs(spark=" ▁▂▃▄▅▆▇█", bar="█", track="░", idle="▒", dot="·")
ASCII = Glyphs(spark=" .:-=+*#@", bar="#", track=".", idle="=", dot="|")


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one style: plain, title, dim, good, fair or bad."""

    text: str
    style: str = "plain"


Line = list[Span]


@dataclass(frozen=True, slots=True)
class View:
    """Everything that one frame shows.

    error: why the last scrape failed, or None. unreachable_s: seconds since the last that did not.
    long: the longer of the two spans of time whose latencies are shown, with its name.
    """

    url: str
    history: History
    long: tuple[str, Window] | None
    glyphs: Glyphs = UNICODE
    error: str | None = None
    unreachable_s: float = 0.0
    keys: str = ""

    @property
    def recent(self) -> Window | None:
        return self.history.last_interval()


def draw(view: View, width: int, height: int | None = None) -> list[Line]:
    """At most `height` lines of at most `width` columns; the most important lines come first."""
    lines = [_title(view, width)]
    latest = view.history.latest
    if view.error:
        lines += _unreachable(view)
    elif latest is None:
        lines.append([Span("waiting for the first metrics", "dim")])
    else:
        lines += _panels(view, latest, width)
    if height is not None and len(lines) > height:
        lines = [line for line in lines if line]  # drop the gaps first
    return [_cropped(line, width) for line in lines[:height]]


def text(line: Line) -> str:
    """Without styles, for --once."""
    return "".join(span.text for span in line).rstrip()


def _title(view: View, width: int) -> Line:
    name = f"penstock top  {_clean(view.url)}"
    keys = view.keys.rjust(width - len(name)) if len(name) + len(view.keys) < width else ""
    return [Span(name, "title"), Span(keys, "dim")]


def _unreachable(view: View) -> Iterator[Line]:
    yield [Span(f"The server is unreachable: {_clean(view.error or '')}", "bad")]
    if view.history.latest:
        yield [Span(f"It last responded {_duration(view.unreachable_s)} ago; retrying.", "dim")]
    else:
        yield [Span("It has not responded yet; retrying.", "dim")]


def _panels(view: View, latest: Scrape, width: int) -> Iterator[Line]:
    yield [Span(_about(latest, view.glyphs, width), "dim")]
    yield []
    yield from _throughput(view, latest, width)
    yield []
    yield from _latencies(view, width)
    yield []
    yield from _utilization(view, latest, width)
    yield []
    yield from _memory(view, latest, width)


def _about(latest: Scrape, glyphs: Glyphs, width: int) -> str:
    """The model, its device and the uptime: as many whole items as fit."""
    model, build = latest.info("model_info"), latest.info("build_info")
    name_first = sorted(model.items(), key=lambda item: ("name" not in item[0], item[0]))
    words = [_clean(value) for _, value in name_first if value]
    if latest.age_s is not None:
        words.append(f"up {_duration(latest.age_s)}")
    if version := build.get("version"):
        words.append(f"penstock {_clean(version)}")
    if startup := latest.value("startup_seconds"):
        words.append(f"started in {_seconds(startup)}")
    between = f" {glyphs.dot} "
    while len(words) > 1 and len(between.join(words)) > width:
        words.pop()
    return between.join(words) or "a Penstock server"


# Throughput ---------------------------------------------------------------------------------------


def _throughput(view: View, latest: Scrape, width: int) -> Iterator[Line]:
    recent = view.recent
    half = max(1, (width - 2) // 2)
    room = min(_MOST_SPARK, half - 18) if width >= _HALF_SPARK_FROM else 0
    windows = list(view.history.intervals())
    for kind, metrics in _RATES.items():
        line: Line = []
        for name, metric in metrics.items():
            if kind == "tokens/s":
                value = recent.rate(metric) if recent else None
                past = [window.rate(metric) for window in windows]
            else:
                value = latest.value(metric)
                past = [window.later.value(metric) for window in windows]
            drawn = _sparkline(past, room, view.glyphs) if room > 0 else ""
            line += [
                _label(name),
                Span(f"{_count(value):>8} "),
                Span(drawn.ljust(max(0, half - 18)), "good"),
                Span("  "),
            ]
        yield [*line[:-1], Span(f"  {kind}" if not room else "", "dim")]
    yield _outcomes(recent, latest)


def _outcomes(recent: Window | None, latest: Scrape) -> Line:
    ended = recent.rate("requests_total") if recent else None
    line = [_label("requests"), Span(f"{_count(ended):>8}/s ")]
    for outcome in _OUTCOMES:
        value = latest.value("requests_total", outcome=outcome)
        style = "bad" if outcome == "failed" and value else "plain"
        line += _named(outcome, _whole(value), style)
    return line


# Latencies ----------------------------------------------------------------------------------------


def _latencies(view: View, width: int) -> Iterator[Line]:
    recent = view.recent
    spans = [(f"last {recent.seconds:.1f} s", recent)] if recent else []
    spans += [view.long] if view.long else []
    if width < _BOTH_SPANS_FROM:
        spans = spans[-1:]  # the longer, which covers more requests
    header = "".join(f"{name:>10}{'':23}" for name, _ in spans)
    yield [Span(" " * _LABEL_WIDTH), Span(header.rstrip(), "title")]
    quantiles = "".join(f"{f'p{q * 100:.0f}':>10}" for q in _QUANTILES) + "   "
    yield [Span(" " * _LABEL_WIDTH), Span((quantiles * len(spans)).rstrip(), "dim")]
    for label, name in _LATENCIES:
        line = [_label(label)]
        for _, window in spans:
            buckets = window.histogram(name)
            cells = "".join(f"{_seconds(buckets.quantile(q)):>10}" for q in _QUANTILES)
            line.append(Span(cells + "   "))
        yield line


# Utilization --------------------------------------------------------------------------------------


def _utilization(view: View, latest: Scrape, width: int) -> Iterator[Line]:
    """A row for each class of steps; a bar for each peak that the server exports."""
    columns = [
        (title, f"model_{resource}_utilization_ratio", peak, unit, f"peak_{resource}_{per}")
        for title, resource, per, unit in (
            ("MBU", "bandwidth", "bytes_per_second", "B/s"),
            ("MFU", "flops", "per_second", "FLOP/s"),
        )
        for peak in ("datasheet", "measured")
        if latest.value(f"peak_{resource}_{per}", peak=peak)
    ]
    recent, room = view.recent, max(0, (width - _LABEL_WIDTH - 9) // max(1, len(columns)) - 1)
    header = [_label("step of"), Span(f"{'time':>8} ", "dim")]
    for title, _, peak, unit, peak_name in columns:
        of = f"{_si(latest.value(peak_name, peak=peak))}{unit}"
        header.append(Span(f" {_fitting(title, peak, of, room):<{room}}", "title"))
    if not columns:
        header.append(Span(" MBU, MFU: the server has no peak rates of this device", "dim"))
    yield header
    for step_class in (*_CLASSES, "all"):
        labels = {} if step_class == "all" else {"class": step_class}
        mean = recent.histogram("step_time_seconds", **labels).mean if recent else None
        line = [_label(step_class), Span(f"{_seconds(mean):>8} ")]
        for _, name, peak, _, _ in columns:
            ratio = latest.value(name, peak=peak, **{"class": step_class})
            line += [Span(" "), *_ratio_bar(ratio, room, view.glyphs)]
        yield line


def _fitting(title: str, peak: str, of: str, room: int) -> str:
    """The longest title of a bar that fits above it."""
    for words in (f"{title} of {of} ({peak})", f"{title} {peak} {of}", f"{title} {peak}"):
        if len(words) <= room:
            return words
    return f"{title} {peak}"[:room]


def _ratio_bar(ratio: float | None, room: int, glyphs: Glyphs) -> Line:
    bar_width = max(0, room - 7)
    known = ratio or 0.0
    style = "good" if known >= 0.6 else "fair" if known >= 0.3 else "bad"
    filled = round(min(1.0, known) * bar_width)
    share = f"{_percent(ratio):>7}"[-room:] if room > 0 else ""
    return [
        Span(glyphs.bar * filled, style),
        Span(glyphs.track * (bar_width - filled), "dim"),
        Span(share),
    ]


# Memory and steps ---------------------------------------------------------------------------------


def _memory(view: View, latest: Scrape, width: int) -> Iterator[Line]:
    yield _steps(view.recent)
    yield _kv(latest, width, view.glyphs)
    long = view.long[1] if view.long else None
    hits = long.share("prefix_hit_tokens_total", "prefix_query_tokens_total") if long else None
    yield [
        _label("prefix"),
        Span(f"{_percent(hits):>8}"),
        Span(" of looked-up tokens", "dim"),
        *_named("  preemptions", _whole(latest.value("preemptions_total"))),
        *_named("recomputed", _whole(latest.value("recomputed_tokens_total"))),
    ]


def _steps(recent: Window | None) -> Line:
    batch = recent.histogram("batch_size_sequences").mean if recent else None
    tokens = recent.histogram("step_tokens").mean if recent else None
    steps = recent.histogram("step_time_seconds") if recent else None
    idle = recent.later.value("engine_idle_ratio") if recent else None
    return [
        _label("step"),
        Span(f"{_seconds(steps.quantile(0.5) if steps else None):>8} p50  "),
        Span(f"{_seconds(steps.quantile(0.99) if steps else None)} p99"),
        *_named("  batch", _count(batch)),
        *_named("tokens", _count(tokens)),
        *_named("idle", _percent(idle)),
    ]


def _kv(latest: Scrape, width: int, glyphs: Glyphs) -> Line:
    kinds = ("used", "idle", "free")
    blocks = {kind: latest.value(f"kv_{kind}_blocks") for kind in kinds}
    total = sum(value or 0.0 for value in blocks.values())
    share = (blocks["used"] or 0.0) / total if total else None
    words: Line = []
    for kind, value in blocks.items():
        words += _named(kind, _whole(value))
    if size := latest.value("kv_block_size_tokens"):
        words.append(Span(f"  of {size:.0f} tokens", "dim"))
    room = max(0, min(_MOST_SPARK, width - _LABEL_WIDTH - 9 - sum(len(w.text) for w in words)))
    used = round((share or 0.0) * room)
    idle = min(room - used, round((blocks["idle"] or 0.0) / total * room)) if total else 0
    style = "bad" if (share or 0.0) > 0.95 else "fair" if (share or 0.0) > 0.8 else "good"
    return [
        _label("KV blocks"),
        Span(f"{_percent(share):>8} "),
        Span(glyphs.bar * used, style),
        Span(glyphs.idle * idle),
        Span(glyphs.track * (room - used - idle), "dim"),
        *words,
    ]


# Words and numbers --------------------------------------------------------------------------------


def _label(name: str) -> Span:
    return Span(f"{name:<{_LABEL_WIDTH}}", "dim")


def _named(name: str, value: str, style: str = "plain") -> Line:
    return [Span(f"  {name} ", "dim"), Span(value, style)]


def _sparkline(values: list[float | None], room: int, glyphs: Glyphs) -> str:
    """The newest at the right; if not all fit, each column is the mean of several values."""
    known = [value or 0.0 for value in values]
    per_column = max(1, -(-len(known) // room))
    # Groups are formed from the newest value, so that the rightmost is always complete.
    ends = range(len(known), 0, -per_column)
    means = [fmean(known[max(0, end - per_column) : end]) for end in ends][::-1]
    top = max(means, default=0.0)
    last = len(glyphs.spark) - 1
    return "".join(
        # Any value above 0 is visible, however small.
        glyphs.spark[max(1, round(value / top * last)) if value > 0 else 0]
        for value in means
    )


def _cropped(line: Line, width: int) -> Line:
    kept: Line = []
    for span in line:
        kept.append(Span(span.text[: max(0, width)], span.style))
        width -= len(span.text)
    return [span for span in kept if span.text]


def _clean(words: str) -> str:
    """Without control characters and characters that may be two columns wide."""
    return "".join(char if " " <= char < "\u0300" and char.isprintable() else "?" for char in words)


def _seconds(value: float | None) -> str:
    """Three digits, in us, ms or s."""
    if value is None:
        return _DASH
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if value * factor < 999.5:
            return f"{_three_digits(value * factor)} {unit}"
    return f"{_three_digits(value)} s"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole_seconds:02}s" if minutes else f"{whole_seconds}s"


def _count(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{value:.1f}" if 0 < value < 99.95 and value != int(value) else f"{value:,.0f}"


def _whole(value: float | None) -> str:
    return _DASH if value is None else f"{value:,.0f}"


def _percent(ratio: float | None) -> str:
    return _DASH if ratio is None else f"{ratio * 100:.1f} %"


def _si(value: float | None) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value is not None and value >= size:
            return f"{_three_digits(value / size)} {prefix}"
    return _DASH if value is None else f"{value:.0f} "

"""The content and the format of the log."""

import asyncio
import json
import logging
import re
import time
from dataclasses import replace

import pytest

from penstock.engine.executors.scripted import scripted_info
from penstock.engine.process.logs import JsonFormatter, TextFormatter, fields
from penstock.engine.step.messages import StepReport
from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.stats import NO_WORK, AttentionWork, GroupBlocks, SchedulerStats, StepWork
from penstock.scheduler.types import RequestId, RequestOutput
from penstock.server.observability.activity import Activity
from penstock.server.observability.metrics import Metrics
from penstock.server.observability.request_log import request_id
from tests.support.serving import RunningServer

INFO = replace(scripted_info(), measured_bandwidth_bytes_per_s=1e9)


def _record(**fields: object) -> logging.LogRecord:
    record = logging.makeLogRecord({"name": "penstock", "levelname": "INFO", "msg": "it is %s"})
    record.__dict__.update({"args": ('"so"\n',)} | fields)
    return record


def test_a_json_line_is_one_object_with_time_level_logger_and_message() -> None:
    line = JsonFormatter().format(_record(created=1_700_000_000.25))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "penstock",
        "message": 'it is "so"\n',
    }


def test_a_json_line_contains_the_request_id_and_the_exception() -> None:
    token = request_id.set("req-7")
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
        entry = json.loads(JsonFormatter(request_id.get).format(_record(exc_info=info)))
    finally:
        request_id.reset(token)
    assert entry["request_id"] == "req-7"
    assert entry["exception"].endswith("ValueError: no such thing")


def test_fields_stay_fields_in_json_and_follow_the_message_in_text() -> None:
    extra = fields(request_id="req-7", route="/v1/x", tokens=3, error=None, odd='a b="c"')
    entry = json.loads(JsonFormatter().format(_record(**extra)))
    assert entry["request_id"] == "req-7" and entry["tokens"] == 3 and entry["error"] is None
    line = TextFormatter().format(_record(msg="done", args=(), **extra))
    assert line.endswith(r'INFO [req-7] done route=/v1/x tokens=3 odd="a b=\"c\""')


@pytest.mark.parametrize("form", [TextFormatter, JsonFormatter])
def test_no_control_character_reaches_a_line_and_no_message_begins_a_second_one(
    form: type[logging.Formatter],
) -> None:
    hostile = "a\x1b[2J\x85\u202eb\r\n2026-01-01 INFO forged"
    lines = form().format(_record(args=(hostile,))).split("\n")
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What `--log-format json` writes to stderr until the engine fails to start."""
    server = RunningServer("--log-format", "json", "--max-model-len", "99999999")
    code, errors = server.exit_code(timeout_s=60)
    assert code == 2
    return errors.splitlines()


def test_with_json_every_line_of_both_processes_is_an_object(lines: list[str]) -> None:
    entries = [json.loads(line) for line in lines]
    assert "error" in {entry["level"] for entry in entries}
    assert "--max-model-len" in entries[-1]["message"]


class _Load:
    """The metrics of a server, with steps reported by hand."""

    def __init__(self) -> None:
        self.metrics = Metrics("model")
        self.metrics.on_ready(INFO)
        self._step = 0

    def step(self, *, running: int = 1, hits: int = 0) -> None:
        """A step of 1 s: 10 prompt tokens, 2 output tokens, 400 MB read."""
        self._step += 1
        outputs = StepOutputs.of([RequestOutput(RequestId("a"), 0, [5, 6], None, None, 0)])
        groups = (GroupBlocks(None, num_used=25, num_evictable=50, num_free=25),)
        stats = SchedulerStats(running, 3, 100 * self._step, hits, groups=groups)
        work = StepWork(10, 0, 1, 1, 0, (AttentionWork(0, 0),))
        self.metrics.on_step(
            StepReport(self._step, outputs, stats, work, time.monotonic() - 1, 1.0, 400_000_000, 0)
        )


def test_the_line_has_running_requests_rates_and_kv_use() -> None:
    load = _Load()
    activity = Activity(load.metrics, INFO)
    for _ in range(4):
        load.step(hits=300)
    line = activity.line()
    assert line
    numbers = re.sub(r"[\d.]+ tokens/s", "N tokens/s", line)
    assert numbers == (
        "running 1, waiting 3, prompt N tokens/s, output N tokens/s, MBU 40.0%, KV use 25.0%, "
        "prefix hits 75.0%"
    )
    prompt, output = (float(rate) for rate in re.findall(r"([\d.]+) tokens/s", line))
    assert prompt / output == pytest.approx(40 / 8, rel=0.01)


async def test_the_line_is_written_only_while_there_is_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    load = _Load()
    running = asyncio.create_task(Activity(load.metrics, INFO, interval_s=0.02).run())
    await asyncio.sleep(0.1)
    assert not caplog.records
    load.step()
    await asyncio.sleep(0.1)
    assert len(caplog.records) >= 2  # one sequence runs, though no step has ended since
    idle = StepReport(0, StepOutputs(), SchedulerStats(), NO_WORK, time.monotonic(), 0.0, 0, 0)
    load.metrics.on_step(idle)
    await asyncio.sleep(0.05)
    caplog.clear()
    await asyncio.sleep(0.1)
    assert not caplog.records
    running.cancel()

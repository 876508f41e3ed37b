"""Metrics of LoRA adapters."""

import time
from collections.abc import Iterator, Mapping, Set

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def adapter_metrics(
    max_loras: int, running: Set[str], waiting: Set[str], num_requests: Mapping[str, int]
) -> Iterator[Metric]:
    """running, waiting: names of adapters with such requests. num_requests: by name."""
    # As in vLLM: of the series that a change of labels leaves behind, the latest counts.
    info = GaugeMetricFamily(
        "penstock_lora_requests_info",
        "With --enable-lora, when it was so: the adapters with a request that runs, and with one "
        "that waits",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    names = [",".join(sorted(each)) for each in (running, waiting)]
    info.add_metric((str(max_loras), *names), time.time())
    yield info
    requests = CounterMetricFamily(
        "penstock_lora_adapter_requests",
        "With --enable-lora: requests that named an adapter, since it was loaded",
        labels=("adapter",),
    )
    for name, count in num_requests.items():
        requests.add_metric((name,), count)
    yield requests

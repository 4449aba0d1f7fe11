"""Queue switch overhead at a stream count, from the probe's kernels that stamp the device's own clock."""

import torch

from aorta.results.metrics import not_measured
from aorta.results.schema import Interval, Metric


def switch_metrics(device: torch.device, streams: int) -> dict[str, Metric]:
    """Cost of a change of stream in a chain of kernels that goes around this many streams, over staying on
    one; null with a reason where the device has no clock to read. It depends on the number of streams, all
    but one of which wait at any time: docs/queue_probe.md."""
    if device.type == "cpu":
        return {"queue_switch_us": not_measured("us", "needs a GPU", "lower")}
    if streams < 2:
        return {"queue_switch_us": not_measured("us", "one stream has nothing to switch to", "lower")}
    from aorta.queues.probe.parts.switch import measure_switch

    cost = measure_switch(device, streams)
    if cost.per_switch_us is None:
        return {"queue_switch_us": not_measured("us", cost.reason or "not measured", "lower")}
    interval = None
    if cost.interval_us is not None:
        interval = Interval(low=cost.interval_us[0], high=cost.interval_us[1])
    metrics = {
        "queue_switch_us": Metric(
            value=cost.per_switch_us,
            unit="us",
            better="lower",
            interval=interval,
            reason=cost.reason,
            source=f"chain around {streams} streams; compare at equal numbers only",
        )
    }
    if cost.same_stream_us is not None:
        metrics["same_stream_us"] = Metric(value=cost.same_stream_us, unit="us", better="lower")
    if cost.clock_tick_ns is not None:
        metrics["clock_tick_ns"] = Metric(value=cost.clock_tick_ns, unit="ns")
    return metrics

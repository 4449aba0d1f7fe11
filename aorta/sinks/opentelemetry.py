"""OpenTelemetry metrics: --to opentelemetry=http://collector:4318 (OTLP over HTTP)."""

from typing import Any

from aorta.records.schema import StepRecord
from aorta.sinks.scalars import HELP, scalars
from aorta.sinks.sink import Place

RANKS = "all"
TAKES_RECORDS = True
PACKAGE = "opentelemetry"
EXPORT_EVERY_MS = 5000
"""Time between two exports to the collector."""


def open_sink(target: str, place: Place) -> "OpenTelemetryMetrics":
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    endpoint = target.rstrip("/")
    if not endpoint.endswith("/v1/metrics"):
        endpoint += "/v1/metrics"
    exporter = OTLPMetricExporter(endpoint=endpoint, timeout=5)
    return OpenTelemetryMetrics(PeriodicExportingMetricReader(exporter, EXPORT_EVERY_MS), place)


class OpenTelemetryMetrics:
    """Gauges of the last step and a histogram of step times, per rank."""

    def __init__(self, reader: Any, place: Place) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        resource = Resource.create(
            {"service.name": "aorta", "rank": place.rank, "world_size": place.world_size}
        )
        self._provider = MeterProvider([reader], resource=resource)
        self._meter = self._provider.get_meter("aorta")
        self._gauges: dict[str, Any] = {}
        self._step_ms = self._meter.create_histogram("aorta.step", "ms", HELP["step_ms"])
        self._steps = self._meter.create_counter("aorta.steps", "1", "Steps of this run")

    def add(self, record: StepRecord) -> None:
        self._steps.add(1)
        if record.step_ms is not None:
            self._step_ms.record(record.step_ms)
        for name, value in scalars(record).items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"aorta.{name}", description=HELP.get(name, ""))
            self._gauges[name].set(value)

    def close(self) -> None:
        self._provider.shutdown()

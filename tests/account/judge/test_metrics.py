"""Keys of metrics: read and written in one place."""

import pytest

from aorta.account.metrics import (
    MetricKey,
    meaning,
    metric_key,
    of_operation,
    of_source,
    operations,
    without_source,
)

KEYS = [
    ("step_ms", MetricKey("step_ms")),
    ("busbw_gb_s.all_gather", MetricKey("busbw_gb_s", "all_gather")),
    ("calibrated.exposed_ms", MetricKey("exposed_ms", source="calibrated")),
    ("raw.overlap_ratio", MetricKey("overlap_ratio", source="raw")),
    ("compute_stream.compute_ms", MetricKey("compute_ms", source="compute_stream")),
    ("kernel_ms.a.name.with.dots", MetricKey("kernel_ms", "a.name.with.dots")),
    ("calibrated_ms", MetricKey("calibrated_ms")),
    ("", MetricKey("")),
]


@pytest.mark.parametrize(("text", "key"), KEYS)
def test_a_key_is_read_and_written_alike(text: str, key: MetricKey) -> None:
    assert metric_key(text) == key
    assert str(key) == text


def test_keys_of_operations_and_sources() -> None:
    assert of_operation("count", "all_reduce") == "count.all_reduce"
    assert of_source("calibrated", "comm_ms") == "calibrated.comm_ms"
    assert of_source("", "comm_ms") == "comm_ms"
    assert without_source("raw.exposed_ms") == "exposed_ms"
    assert without_source("busbw_gb_s.all_gather") == "busbw_gb_s.all_gather"


def test_operations_are_those_of_one_name_in_order() -> None:
    names = ["count.b", "count.a", "counts.c", "bytes.d", "count", "calibrated.count.e"]
    assert operations(names, "count") == ["b", "a"]


def test_numbers_beside_the_leading_ones_get_no_verdict() -> None:
    assert meaning("exposed_ms").judged
    assert not meaning("raw.exposed_ms").judged
    assert not meaning("exposed_ms.all_gather").judged
    assert meaning("transfer_ms.all_gather").judged
    assert meaning("unheard_of_ms").unit == "ms"

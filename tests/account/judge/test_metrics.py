"""Keys of metrics: read and written in one place."""

import pytest

from aorta.account.metrics import (
    MetricKey,
    meaning,
    metric_key,
    of_operation,
    operations,
)

KEYS = [
    ("step_ms", MetricKey("step_ms")),
    ("busbw_gb_s.all_gather", MetricKey("busbw_gb_s", "all_gather")),
    ("kernel_ms.a.name.with.dots", MetricKey("kernel_ms", "a.name.with.dots")),
    ("calibrated_ms", MetricKey("calibrated_ms")),
    ("", MetricKey("")),
]


@pytest.mark.parametrize(("text", "key"), KEYS)
def test_a_key_is_read_and_written_alike(text: str, key: MetricKey) -> None:
    assert metric_key(text) == key
    assert str(key) == text


def test_keys_of_operations() -> None:
    assert of_operation("count", "all_reduce") == "count.all_reduce"


def test_operations_are_those_of_one_name_in_order() -> None:
    names = ["count.b", "count.a", "counts.c", "bytes.d", "count"]
    assert operations(names, "count") == ["b", "a"]


def test_numbers_of_one_operation_get_no_verdict() -> None:
    assert meaning("exposed_ms").judged
    assert not meaning("exposed_ms.all_gather").judged
    assert meaning("transfer_ms.all_gather").judged
    assert meaning("unheard_of_ms").unit == "ms"

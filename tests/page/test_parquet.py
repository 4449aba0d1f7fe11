import json

import msgspec
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from aorta.errors import ReportError
from aorta.page import parquet
from aorta.page.parquet import KEYS, write_parquet
from aorta.records.schema import DeviceRecord, MemoryRecord
from tests.account.reports_in_memory import dataset_of, records_of, report_of


def written(tmp_path, *datasets):
    path = tmp_path / "steps.parquet"
    num_rows = write_parquet(path, report_of(*datasets))
    table = pd.read_parquet(path)
    assert len(table) == num_rows
    return table


def test_a_row_per_label_rank_and_step(tmp_path):
    a, b = (records_of(num_steps=5, num_ranks=n, seed=n) for n in (2, 3))
    table = written(tmp_path, dataset_of("a", a), dataset_of("b", b))
    assert not table.duplicated(list(KEYS)).any()
    assert table.groupby("label", observed=True).size().to_dict() == {"a": 10, "b": 15}
    for label, by_rank in (("a", a), ("b", b)):
        for rank, records in by_rank.items():
            rows = table[(table.label == label) & (table["rank"] == rank)]
            assert rows.global_step.tolist() == [0, 1, 2, 3, 4]
            for name in ("comm_ms", "exposed_ms", "overlap_ratio"):
                assert rows[name].tolist() == [getattr(record.overlap, name) for record in records]
            assert rows.step_ms.tolist() == [record.step_ms for record in records]
            assert rows.start_unix_ns.tolist() == [record.start_unix_ns for record in records]
            assert rows.warmup.tolist() == [True, False, False, False, False]


def test_numbers_of_an_operation_have_its_name(tmp_path):
    by_rank = records_of(num_steps=3)
    dataset = dataset_of("a", by_rank)
    table = written(tmp_path, dataset)
    assert table["comm_ms.all_gather"].tolist() == pytest.approx([12.0] * 6)
    assert (table["hidden_ms.all_gather"] + table["exposed_ms.all_gather"]).tolist() == pytest.approx(
        [12.0] * 6
    )
    assert table["busbw_gb_s.all_gather"].tolist() == pytest.approx([288.0] * 6)
    assert table["comm_ms.all_reduce"].isna().all()


def test_what_was_not_measured_is_null_and_says_why(tmp_path):
    by_rank = records_of(
        num_steps=3, num_ranks=1, not_measured={"overlap.exposed_copy_ms": "copies are not seen"}
    )
    table = written(tmp_path, dataset_of("a", by_rank))
    assert table["exposed_copy_ms"].isna().all()
    assert table["memory.allocated_bytes"].isna().all()
    assert json.loads(table.not_measured[0]) == {"overlap.exposed_copy_ms": "copies are not seen"}


def test_parts_of_the_record_are_columns(tmp_path):
    by_rank = records_of(
        num_steps=3,
        num_ranks=1,
        memory=MemoryRecord(allocated_bytes=5, reserved_bytes=6, peak_allocated_bytes=7),
        device=DeviceRecord(sample_unix_ns=9, power_w=512.5, throttling=["power", "thermal"]),
    )
    for records in by_rank.values():
        overlap = msgspec.structs.replace(records[0].overlap, host_bound=True)
        records[0] = msgspec.structs.replace(records[0], overlap=overlap)
    row = written(tmp_path, dataset_of("a", by_rank)).iloc[0]
    assert row["memory.peak_allocated_bytes"] == 7
    assert row["device.power_w"] == 512.5
    assert row["device.throttling"] == "power, thermal"
    assert row["streams.allgather.busy_ms"] == by_rank[0][0].streams["allgather"].busy_ms
    assert row["host_bound"]


def test_columns_do_not_depend_on_what_was_measured(tmp_path):
    schemas = []
    for options in ({"num_ranks": 2}, {"num_ranks": 1, "device": DeviceRecord(sample_unix_ns=9)}):
        written(tmp_path, dataset_of("a", records_of(num_steps=3, **options)))
        schemas.append(pq.read_schema(tmp_path / "steps.parquet"))
    assert schemas[0].equals(schemas[1])
    assert schemas[0].names[: len(KEYS)] == list(KEYS)


def test_rows_are_written_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 4)
    table = written(tmp_path, dataset_of("a", records_of(num_steps=5)))
    file = pq.ParquetFile(tmp_path / "steps.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 5, 1]
    assert np.isfinite(table.step_ms).all()


def test_a_failure_leaves_no_file(tmp_path):
    with pytest.raises(ReportError, match="cannot write"):
        write_parquet(tmp_path / "absent" / "steps.parquet", report_of())
    assert list(tmp_path.iterdir()) == []

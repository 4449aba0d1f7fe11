"""A run in which times were taken in one step of four (recording.timed_every)."""

import msgspec

from aorta.report.load import load_run
from aorta.report.summary import dataset, judge
from aorta.report.table import dataset_table
from tests.report.runs import run_record, step_record, step_timeline, write_run

REASON = "not timed in this step (recording.timed_every)"


def sparse_run(folder):
    records = []
    for step in range(32):
        for rank in (0, 1):
            record = step_record(step_timeline(rank=rank, step=step))
            if step % 4:
                known = record.overlap
                nothing = {name: {} if name.endswith("by_op") else None for name in known.__struct_fields__}
                record = msgspec.structs.replace(
                    record,
                    overlap=msgspec.structs.replace(known, **nothing),
                    streams={},
                    active_segments=None,
                    not_measured={"overlap": REASON},
                )
            records.append(record)
    return write_run(folder, records, run_record())


def test_the_table_says_how_many_steps_its_overlap_is_of(tmp_path):
    timed = dataset("a", [judge(load_run(sparse_run(tmp_path), "a"), num_warmup=0)])
    text = dataset_table(timed)
    assert "comm and overlap: of 8 of these 32 steps" in text
    assert timed.statistics["step_ms"].median == 10.0  # of all 32
    assert timed.statistics["comm_ms"].median == 4.5

"""A report with markup wherever a text can come from outside."""

import msgspec

from aorta.account.model import SettingDifference
from tests.account.reports_in_memory import dataset_of, records_of, report_of
from tests.records.run_folders import run_record

HOSTILE = '</script><script>window.hit=1</script><img src=x onerror="window.hit=1"><!-- \u2028 \'"&'


def hostile_report():
    """Markup wherever a text can come from outside."""
    by_rank = records_of(num_steps=6)
    for records in by_rank.values():
        for i, record in enumerate(records):
            rows = [msgspec.structs.replace(row, op=HOSTILE, group=HOSTILE, dtype=HOSTILE, stream=HOSTILE)
                    for row in record.collectives]  # fmt: skip
            records[i] = msgspec.structs.replace(record, collectives=rows)
    run = run_record(
        devices=[{"name": HOSTILE}], environment={HOSTILE: HOSTILE}, versions={"torch": HOSTILE},
        config={"training": {"precision": HOSTILE}}, command=[HOSTILE],
    )  # fmt: skip
    a, b = (
        dataset_of(label, by_rank, run=run, path=HOSTILE, notes=[HOSTILE], not_measured={HOSTILE: HOSTILE})
        for label in (f"a{HOSTILE}", f"b{HOSTILE}")
    )
    for dataset in (a, b):
        inner = dataset.first
        inner.metrics[f"comm_ms.{HOSTILE}"] = inner.metrics["comm_ms"]
        rows = dataset.first.collective_rows
        rows[0] = msgspec.structs.replace(rows[0], op=HOSTILE, dtype=HOSTILE, stream=HOSTILE)
    report = report_of(a, b, comparison=True)
    comparison = msgspec.structs.replace(
        report.comparison, headline=HOSTILE, scope=HOSTILE, notes=[HOSTILE],
        differences=[SettingDifference(HOSTILE, HOSTILE, HOSTILE, None)],
    )  # fmt: skip
    return msgspec.structs.replace(report, comparison=comparison)

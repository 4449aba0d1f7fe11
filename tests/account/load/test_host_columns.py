"""What the host did, against a count of single milliseconds."""

import random

import numpy as np
import pytest

from aorta.account.load.rank import host
from aorta.account.load.rank.host import INNERMOST_FIRST, carry_waits, host_metrics
from aorta.records.schema import HOST_KINDS, HostSpan, HostUse
from aorta.records.table import LineTable
from aorta.timeline.types import Segment
from tests.records import plain_records

WINDOW_MS = 40


def random_record(rng, step, source):
    spans = [
        HostSpan(
            rng.choice(HOST_KINDS), start, start + rng.choice([0, 1, 3, 12]), bytes=rng.choice([None, 7])
        )
        for start in rng.choices(range(-2, WINDOW_MS), k=rng.choice([0, 1, 2, 5, 12]))
    ]
    segments = None
    if rng.random() < 0.6:
        edges = sorted(rng.sample(range(WINDOW_MS + 1), 6))
        streams = [["compute"], [], ["allgather"], ["copy"], ["compute", "allgather"]]
        segments = [
            Segment(start, end, active, len(active))
            for start, end in zip(edges, edges[1:], strict=False)
            for active in [rng.choice(streams)]
        ]
    return plain_records.step(
        step,
        source=source,
        step_ms=rng.choice([float(WINDOW_MS)] * 5 + [None]),
        between_steps_ms=rng.choice([None, 0.0, 7.0]),
        host_spans=rng.choice([spans] * 5 + [None]),
        active_segments=segments,
        host_use=rng.choice([None, HostUse(3.0, 4.0), HostUse(5.0, None), HostUse(5.0, 1.0, 50.0)]),
    )


def expected_use(record):
    if record.host_use is None:
        return {}
    use, found = record.host_use, {"host.use.cpu": record.host_use.cpu_ms}
    found |= {} if use.ready_ms is None else {"host.use.ready": use.ready_ms}
    has_cores = use.process_ms is not None and record.step_ms is not None
    return found | ({"cores_used": use.process_ms / record.step_ms} if has_cores else {})


def expected_columns(record):
    """By name, of one line; nothing where it does not tell."""
    return expected_parts(record) | expected_use(record)


def waiting_ms(record):
    return {
        ms
        for span in record.host_spans or ()
        if span.kind == "synchronisation" and record.step_ms is not None
        for ms in range(int(span.start_ms), int(span.end_ms))
    }


def cost_of_waits(waits, idle):
    """Single ms: each ms of waiting is one that idle time may use up from then on."""
    credit = used = 0
    for ms in range(min(waits | idle, default=0), max(waits | idle, default=0) + 1):
        credit += ms in waits
        if ms in idle and credit:
            credit, used = credit - 1, used + 1
    return used


def loops_of(record):
    """Single ms from the first to the last of two or more waits between which no other span begins."""
    loops, run = set(), []
    for span in [*sorted(record.host_spans, key=lambda span: span.start_ms), None]:
        if span is not None and span.kind == "synchronisation":
            run.append(span)
            continue
        if len(run) >= 2:
            loops |= set(range(int(run[0].start_ms), int(run[-1].end_ms)))
        run = []
    return loops


def expected_parts(record):
    if record.host_spans is None or record.step_ms is None:
        return {}
    kinds, idle = [*INNERMOST_FIRST, "other"], set()
    sums = {f"host.{kind}": 0 for kind in INNERMOST_FIRST}
    sums |= {f"host.{kind}.after": 0 for kind in INNERMOST_FIRST}
    sums["host.between_steps"] = 0
    loops = loops_of(record)
    tells_idle = record.source != "host" and record.active_segments is not None
    if tells_idle:
        sums |= {f"host.idle.{kind}": 0 for kind in kinds if kind not in ("synchronisation", "backward")}
        sums["host.idle.between_steps"] = 0
    for ms in range(WINDOW_MS):
        active = [
            name
            for segment in record.active_segments or ()
            if segment.start_ms <= ms < segment.end_ms
            for name in segment.active_streams
        ]
        doing = {span.kind for span in record.host_spans if span.start_ms <= ms < span.end_ms}
        kind = next((kind for kind in INNERMOST_FIRST if kind in doing), "other")
        if tells_idle and not active:
            is_behind = ms >= WINDOW_MS - (record.between_steps_ms or 0.0)
            rest = "between_steps" if is_behind else "other"
            idles = kind not in ("synchronisation", "backward", "other")
            sums[f"host.idle.{kind if idles else rest}"] += 1
            idle |= {ms} if not idles and not is_behind else set()
        is_exposed = "allgather" in active and "compute" not in active
        if kind == "other" and ms >= WINDOW_MS - (record.between_steps_ms or 0.0) and not is_exposed:
            sums["host.between_steps"] += 1
        if kind == "other":
            continue
        if ms >= WINDOW_MS - (record.between_steps_ms or 0.0):
            sums[f"host.{kind}.after"] += 1
        elif record.source != "host" or "allgather" not in active or "compute" in active:
            sums[f"host.{kind}"] += 1
    if tells_idle:
        cost = max(cost_of_waits(waiting_ms(record), idle), len(loops & idle))
        sums["host.loops_of_waits"] = len(loops)
        sums |= {"host.idle.synchronisation": cost, "host.idle.other": sums["host.idle.other"] - cost}
    updates = [span.end_ms for span in record.host_spans if span.kind == "optimizer"]
    if updates:
        sums["host.behind_update"] = max(WINDOW_MS - max(updates), 0)
        sums["host.until.update"] = min(
            span.start_ms for span in record.host_spans if span.kind == "optimizer"
        )
        if tells_idle:
            behind = {ms for ms in idle - loops if ms >= max(updates)}
            sums["host.idle.behind_update"] = len(behind)
    passes = [span.start_ms for span in record.host_spans if span.kind == "backward"]
    sums |= {"host.until.backward": max(passes)} if passes else {}
    sizes = [span.bytes for span in record.host_spans if span.kind == "optimizer" and span.bytes is not None]
    return sums | ({"host.optimizer_bytes": sum(sizes)} if sizes else {})


@pytest.mark.parametrize("source", ["events", "host"])
def test_each_ms_counts_for_the_innermost_kind(source, monkeypatch):
    monkeypatch.setattr(host, "LOOP", 2)
    rng = random.Random(source)
    records = [random_record(rng, step, source) for step in range(60)]

    columns = host_metrics(LineTable(records))

    expected = [expected_columns(record) for record in records]
    assert set(columns) == {name for of_record in expected for name in of_record}
    for name, values in columns.items():
        wanted = [of_record.get(name, np.nan) for of_record in expected]
        np.testing.assert_array_equal(values, wanted, err_msg=name)


def test_lines_of_versions_without_host_spans_have_no_columns():
    assert not host_metrics(LineTable([plain_records.step(0, host_spans=None)]))


def test_idle_time_uses_up_what_the_step_before_left_of_its_waits():
    """Steps 0 and 1 wait for 9 and 1 ms; 5 and 3 ms of idle time are nothing else's. Step 4 follows none."""
    waited, behind, other = [9.0, 1.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0], [5.0, 3.0, 4.0, 6.0]
    columns = {
        "host.synchronisation": np.array(waited), "host.synchronisation.after": np.zeros(4),
        "host.idle.synchronisation": np.array(behind), "host.idle.other": np.array(other),
    }  # fmt: skip
    carry_waits(columns, np.array([0, 1, 2, 4]))
    assert columns["host.idle.synchronisation"].tolist() == [2.0, 4.0, 0.0, 0.0]
    assert columns["host.idle.other"].tolist() == [5.0, 0.0, 4.0, 6.0]

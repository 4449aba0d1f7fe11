"""Steps in which a rank comes late to a collective."""

from aorta.records.schema import CollectiveRecord
from aorta.timeline.types import Kind, Span, Timeline
from tests.records.run_folders import step_record

SIZE = 1 << 20


def step_of(rank, step, start_ms, end_ms, num_ranks=2, offset_ms=0.0, op="all_gather", **changes):
    """Compute until 6 ms, then a collective; a step of 20 ms. offset_ms: of the rank's clock."""
    origin = 10**15 + step * 20_000_000 + int(offset_ms * 1e6)
    spans = [Span(0, 6, Kind.COMPUTE), Span(start_ms, end_ms, Kind.COMM, op, "nccl")]
    line = Timeline.from_spans(spans, (0.0, 20.0), rank=rank, step=step, origin_unix_ns=origin)
    call = dict(
        op=op, stream="allgather", group="dp", ranks=list(range(num_ranks)), bytes=SIZE, dtype="bfloat16",
        seq=step, start_ms=float(start_ms), end_ms=float(end_ms), algbw_gb_s=None, busbw_gb_s=None,
    )  # fmt: skip
    calls = [CollectiveRecord(**(call | changes))]
    return step_record(line, num_ranks, collectives=calls, num_collectives=1)

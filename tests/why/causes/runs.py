"""Runs of two ranks made by hand, with a known loss; the times are invented."""

import random

from aorta.hardware.part import load_hardware
from aorta.records.schema import CollectiveRecord, DeviceRecord, HostSpan, MemoryRecord
from aorta.timeline.types import Kind, Span, Timeline
from aorta.why.causes.rank import found_causes
from tests.records.run_folders import run_record, step_record, write_run

STEPS = 24
WIDTH = 2
MIB = 1 << 20
RATE = load_hardware("h200").memory.sustained_hbm_bytes_per_s / 1e12
"""GB that an H200 moves in a ms."""


def causes(judged):
    return found_causes(judged).listed


class Host:
    """A step of a CPU rank: pieces in order, each host work or a synchronous collective."""

    def __init__(self):
        self.at, self.spans, self.calls, self.host, self.between = 0.0, [], [], [], 0.0

    def work(self, ms, kind=None, where="", size=None):
        if kind is not None:
            self.host.append(HostSpan(kind, self.at, self.at + ms, where, size))
        self.spans.append(Span(self.at, self.at + ms, Kind.COMPUTE))
        self.at += ms
        return self

    def idle(self, ms, kind=None):
        """The device idles."""
        if kind is not None:
            self.host.append(HostSpan(kind, self.at, self.at + ms))
        self.at += ms
        return self

    def comm(
        self,
        ms,
        op="all_reduce",
        size=MIB,
        is_async=False,
        start=None,
        module=None,
        lead=None,
        phase=None,
        group="default",
    ):
        """lead: ms before it began that the host had launched it."""
        begin = self.at if start is None else start
        self.spans.append(Span(begin, begin + ms, Kind.COMM, op, "host"))
        self.calls.append((op, begin, begin + ms, size, is_async, module, lead, group, phase))
        if start is None:
            self.at += ms
        return self

    def after(self, ms, kind=None, is_busy=False):
        """Behind the body of the step; is_busy: the device works meanwhile."""
        if kind is not None:
            self.host.append(HostSpan(kind, self.at, self.at + ms))
        if is_busy:
            self.spans.append(Span(self.at, self.at + ms, Kind.COMPUTE))
        self.at += ms
        self.between += ms
        return self


def line(host, rank, step, origin_ns, first_seq, source="host", **changes):
    timeline = Timeline.from_spans(
        host.spans, (0.0, host.at), rank=rank, step=step, source=source, origin_unix_ns=origin_ns
    )
    calls = [
        CollectiveRecord(
            op=op,
            stream="host",
            group=group,
            ranks=[0, 1],
            bytes=size,
            dtype="float32",
            seq=first_seq + i,
            is_async=is_async,
            module=module,
            phase=phase,
            launch_ms=None if lead is None else start - lead,
            start_ms=start,
            end_ms=end,
            algbw_gb_s=None,
            busbw_gb_s=size / (end - start) / 1e6,
        )
        for i, (op, start, end, size, is_async, module, lead, group, phase) in enumerate(host.calls)
    ]
    fields = dict(
        collectives=calls,
        num_collectives=len(calls),
        host_spans=host.host,
        between_steps_ms=host.between,
    )
    return step_record(timeline, **(fields | changes))


def run_of(folder, make, run=None, steps=STEPS, seed=0, width=WIDTH):
    """make(rank, step, noise) -> Host, or (Host, changes of the record; delay_ms: of its start)."""
    noise = random.Random(seed)
    records = []
    origin_ns, seq = 10**18, 0
    for step in range(steps):
        made = [make(rank, step, noise) for rank in range(width)]
        made = [one if isinstance(one, tuple) else (one, {}) for one in made]
        for rank, (host, changes) in enumerate(made):
            of_record = {name: value for name, value in changes.items() if name != "delay_ms"}
            start_ns = origin_ns + int(changes.get("delay_ms", 0) * 1e6)
            records.append(line(host, rank, step, start_ns, seq, **of_record))
        seq += len(made[0][0].calls)
        origin_ns += int(max(host.at for host, _ in made) * 1e6)
    return write_run(folder, sorted(records, key=lambda one: one.rank), run or run_record(width))


def plain(noise, compute=30.0, comm=2.0):
    """A step without a cause: a little noise, little exposed."""
    return Host().work(compute * noise.gauss(1, 0.01)).comm(comm)


def slow_loader(rank, step, noise):
    return Host().work(9.0, "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)


def many_small(rank, step, noise):
    host = Host().work(10.0 * noise.gauss(1, 0.01))
    for _ in range(12):
        host.comm(1.5, size=1 << 12)
    return host


def waited(late_ms, rank, step, noise, late_rank=1, **work):
    """The late rank works longer by late_ms; the other one waits for it in the collective."""
    if rank == late_rank:
        return Host().work(late_ms, **work).work(30.0).comm(2.0)
    return Host().work(30.0).comm(2.0 + late_ms)


def sampled(clock=1980.0, throttling=None, retries=0, used=40 << 30):
    return {
        "device": DeviceRecord(
            sample_unix_ns=1, sm_clock_mhz=clock, throttling=throttling or [], memory_used_bytes=used
        ),
        "memory": MemoryRecord(
            allocated_bytes=used,
            reserved_bytes=used,
            peak_allocated_bytes=used,
            num_alloc_retries=retries,
        ),
    }


GPU_RUN = run_record(
    WIDTH, devices=[{"kind": "cuda", "name": "Invented GPU", "memory_bytes": 80 << 30}] * WIDTH
)

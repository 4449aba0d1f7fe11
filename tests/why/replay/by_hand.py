"""Small Kineto traces written by hand: one thread, kernels on streams, times in µs."""

import json
from pathlib import Path
from typing import Any

COMPUTE, COMM = 7, 21
LAUNCH_US = 5.0
"""Length of every launch call."""


class HandTrace:
    """One rank's trace. Launches follow each other by `every` µs of host time unless told when."""

    def __init__(self, rank: int = 0, world: int = 1, every: float = 1.0) -> None:
        self.rank, self.world, self.every = rank, world, every
        self.events: list[dict[str, Any]] = []
        self.host = 0.0
        self.correlation = 0

    def _add(self, cat: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> None:
        pid = 0 if cat in ("kernel", "gpu_memcpy", "cuda_sync") else 100
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def think(self, us: float) -> None:
        self.host += us

    def call(self, name: str, dur: float = LAUNCH_US) -> int:
        """A host call now; its correlation id."""
        self.correlation += 1
        self._add("cuda_runtime", name, self.host, dur, 1, correlation=self.correlation)
        self.host += dur + self.every
        return self.correlation

    def kernel(
        self, name: str, start: float, dur: float, stream: int = COMPUTE, grid: int = 1, **args: Any
    ) -> None:
        """Launched now, running then."""
        correlation = self.call("cudaLaunchKernel")
        self._add(
            "kernel", name, start, dur, stream, correlation=correlation, stream=stream, device=self.rank,
            grid=[grid, 1, 1], block=[128, 1, 1], **args,
        )  # fmt: skip

    def collective(
        self, op: str, start: float, dur: float, size_bytes: int = 4 << 20, stream: int = COMM
    ) -> None:
        self.kernel(
            f"ncclDevKernel_{op}", start, dur, stream,
            **{
                "Collective name": op, "In msg nelems": size_bytes // 4, "Out msg nelems": size_bytes // 4,
                "dtype": "Float", "Process Group Name": "0",
                "Process Group Ranks": str(list(range(self.world))),
            },
        )  # fmt: skip

    def record(self) -> int:
        return self.call("cudaEventRecord", 1.0)

    def wait(self, stream: int, record: int, record_stream: int) -> None:
        """The stream waits for an event, with its synchronisation event."""
        correlation = self.call("cudaStreamWaitEvent", 1.0)
        self._add(
            "cuda_sync", "Stream Wait Event", self.host, 0, stream, correlation=correlation, stream=stream,
            wait_on_stream=record_stream, wait_on_cuda_event_record_corr_id=record,
        )  # fmt: skip

    def synchronise(self, until: float, name: str = "cudaStreamSynchronize") -> None:
        """The host waits until then, for all work of the compute stream so far."""
        correlation = self.call(name, until - self.host)
        if "Stream" in name:
            self._add(
                "cuda_sync", "Stream Sync", self.host, 0, COMPUTE, correlation=correlation, stream=COMPUTE
            )

    def scope(self, name: str, start: float, end: float, cat: str = "user_annotation") -> None:
        self._add(cat, name, start, end - start, 1)

    def step(self, number: int, start: float, end: float) -> None:
        self.scope(f"ProfilerStep#{number}", start, end)

    def write(self, folder: Path) -> Path:
        path = folder / f"rank{self.rank}.json"
        path.write_text(
            json.dumps(
                {
                    "schemaVersion": 1,
                    "distributedInfo": {"rank": self.rank, "world_size": self.world, "backend": "nccl"},
                    "baseTimeNanoseconds": 1_000_000_000_000,
                    "traceEvents": self.events,
                }
            )
        )
        return path

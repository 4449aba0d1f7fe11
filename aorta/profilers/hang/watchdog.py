"""A thread of every rank that notices when no step ends any more, and writes where the rank stands.

The rank that notices first tells the others through the store, so that all reports are of one moment.
Progress is the host beginning a step, and the device finishing those that the host has left behind.
"""

import faulthandler
import io
import logging
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from aorta.config import HangConfig
from aorta.device.telemetry import TelemetrySampler
from aorta.errors import AortaError
from aorta.profilers.hang.find import find, sentence
from aorta.profilers.hang.schema import (
    FOLDER,
    HangReport,
    flight_recorder_name,
    read_reports,
    report_name,
    stacks_name,
)
from aorta.profilers.hang.state import group_states, journal_of, main_thread_frames
from aorta.recording.calls import Call
from aorta.records.writer import move_aside, write_json

log = logging.getLogger(__name__)

ABORT_STATUS = 124
"""As timeout(1) ends."""
POLL_S = 1.0
OTHERS_S = 4.0
"""How long a rank that reports waits for the reports of the others."""
FLIGHT_RECORDER_S = 3.0
SAMPLE_S = 2.0
LEAST_BY_MEDIAN_S = 10.0
STEPS_FOR_MEDIAN = 10
INTERPRETER_STUCK_S = 2.0


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class Watchdog:
    """Call beat() before each step. Costs a clock reading per step; its thread looks once a second."""

    def __init__(
        self,
        hang: HangConfig,
        output_dir: str | Path,
        rank: int,
        world_size: int,
        *,
        recorder: object = None,
        store: Store | None = None,
        device: torch.device | None = None,
        exit_now: Callable[[int], Any] = os._exit,
    ) -> None:
        """recorder: what notes the collectives; without one the reports hold stacks and steps alone.

        store: shared by the ranks; without one each rank reports by itself.
        """
        self.hang = hang
        self._output_dir = Path(output_dir)
        self._folder = self._output_dir / FOLDER
        self._rank, self._world_size = rank, world_size
        self._journal = journal_of(recorder)
        self._store = store
        self._device = device
        self._exit_now = exit_now
        self._poll_s = min(POLL_S, hang.timeout_s / 5)
        self._durations_s: deque[float] = deque(maxlen=100)
        self._step: int | None = None
        self._num_steps = 0
        self._progress_s = time.monotonic()
        self._finished_step: tuple[int, list[Call]] | None = None
        self._waiting_step: int | None = None
        self._device_progress_s = self._progress_s
        self._num_reports = 0
        self._reported_at_step = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aorta-hang", daemon=True)

    def __enter__(self) -> Self:
        if self.hang.enabled:
            if self._rank == 0:
                self._move_old_reports()
            self._progress_s = self._device_progress_s = time.monotonic()
            self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
            faulthandler.cancel_dump_traceback_later()

    def beat(self, global_step: int) -> None:
        """The rank is about to begin this step."""
        now_s = time.monotonic()
        if self._num_steps:
            self._durations_s.append(now_s - self._progress_s)
        journal = self._journal
        if journal is not None and journal.current is not None:
            self._finished_step = (journal.current.global_step, journal.current.calls)
        self._step = global_step
        self._num_steps += 1
        self._progress_s = now_s

    def limit_s(self) -> float:
        """Time without progress that is one too much, as of now."""
        limit_s, factor = self.hang.timeout_s, self.hang.median_factor
        if factor is None or len(self._durations_s) < STEPS_FOR_MEDIAN:
            return limit_s
        usual_s = statistics.median(self._durations_s)
        return min(limit_s, max(LEAST_BY_MEDIAN_S, factor * usual_s))

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # or questions about events would open another device
        while not self._closing.wait(self._poll_s):
            try:
                self._look()
            except Exception:
                log.exception("rank %d: the watchdog for hangs stops", self._rank)
                return

    def _look(self) -> None:
        limit_s = self.limit_s()
        self._watch_the_interpreter(limit_s)
        reason = self._standstill(limit_s)
        if self._num_steps == self._reported_at_step:
            return  # this one is told
        if reason is None and self._told_by_another():
            reason = "another rank reports a hang"
        if reason is not None and not self._closing.is_set():
            self._report(reason, limit_s)

    def _standstill(self, limit_s: float) -> str | None:
        now_s = time.monotonic()
        closed = [] if self._journal is None else self._journal.closed
        first = closed[0].global_step if closed else None
        if first is None or first != self._waiting_step:
            self._waiting_step, self._device_progress_s = first, now_s
        if now_s - self._progress_s > limit_s:
            return f"no step was begun for {now_s - self._progress_s:.0f} s"
        if now_s - self._device_progress_s > limit_s:
            return f"the device has not finished step {first} for {now_s - self._device_progress_s:.0f} s"
        return None

    def _told_by_another(self) -> bool:
        try:
            return self._store is not None and self._store.check([self._key()])
        except RuntimeError:  # the store went away with the rank that holds it
            self._store = None
            return False

    def _key(self) -> str:
        return f"hang/{self._num_reports}"

    def _watch_the_interpreter(self, limit_s: float) -> None:
        """Where a library keeps the interpreter lock this thread cannot run: then a thread of faulthandler,
        which needs no lock, writes the stacks to stderr."""
        try:
            faulthandler.dump_traceback_later(limit_s + INTERPRETER_STUCK_S, file=sys.stderr)
        except (AttributeError, ValueError, OSError, io.UnsupportedOperation):
            return  # stderr is no file

    # -- the report -----------------------------------------------------------------------------

    def _report(self, reason: str, limit_s: float) -> None:
        self._reported_at_step = self._num_steps
        with suppress(AttributeError, ValueError):
            faulthandler.cancel_dump_traceback_later()  # this thread runs, and takes its time now
        report = self._describe(reason, limit_s)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / stacks_name(self._rank), "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            write_json(self._folder / report_name(self._rank), report)
        except OSError as error:
            log.warning("rank %d: cannot write %s: %s", self._rank, self._folder, error.strerror)
        is_first = self._count_in() == 1
        self._num_reports += 1
        num_reported = self._wait_for_others() if is_first or self.hang.action == "abort" else 0
        if is_first:
            self._say(num_reported)
        self._add_device(report)
        self._write_flight_recorder()
        if self.hang.action == "abort":
            if self._rank == 0:
                time.sleep(0.5)  # this rank may hold the store that the others still read
            self._exit_now(ABORT_STATUS)

    def _describe(self, reason: str, limit_s: float) -> HangReport:
        not_measured = {"device": "not asked yet"}
        if self._journal is None:
            not_measured["groups"] = "collectives are not recorded (recording.enabled)"
        now_s = time.monotonic()
        return HangReport(
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            written_unix_ns=time.time_ns(),
            reason=reason,
            step=self._step,
            num_steps=self._num_steps,
            since_s=now_s - min(self._progress_s, self._device_progress_s),
            limit_s=limit_s,
            groups=None if self._journal is None else group_states(self._journal, self._finished_step),
            main_thread=main_thread_frames(),
            device=None,
            not_measured=not_measured,
        )

    def _add_device(self, report: HangReport) -> None:
        """Power, clocks and throttling of this moment, once the report is safe: the driver may be stuck."""
        not_measured = {name: why for name, why in report.not_measured.items() if name != "device"}
        device = None
        if self._device is None or self._device.type != "cuda":
            not_measured["device"] = "there is no device"
        else:
            with TelemetrySampler(self._device.index, SAMPLE_S / 4) as sampler:
                end_s = time.monotonic() + SAMPLE_S
                while device is None and time.monotonic() < end_s:
                    time.sleep(0.05)
                    device = sampler.latest()
            if device is None:
                not_measured["device"] = sampler.reason or f"no sample within {SAMPLE_S:g} s"
        with suppress(OSError):
            write_json(
                self._folder / report_name(self._rank),
                msgspec.structs.replace(report, device=device, not_measured=not_measured),
            )

    def _write_flight_recorder(self) -> None:
        """PyTorch's own record of NCCL calls, where this build has one. It may wait for a lock of NCCL's
        threads, so a thread of its own asks for it."""
        dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
        if dump is None:
            return

        def ask() -> None:
            try:
                data = dump()
                if data:
                    (self._folder / flight_recorder_name(self._rank)).write_bytes(data)
            except (OSError, RuntimeError) as error:
                log.info("rank %d: no flight recorder: %s", self._rank, error)

        thread = threading.Thread(target=ask, name="aorta-flight-recorder", daemon=True)
        thread.start()
        thread.join(FLIGHT_RECORDER_S)

    def _count_in(self) -> int:
        """How many ranks have reported, this one included; 1 without a store."""
        if self._store is None:
            return 1
        try:
            return self._store.add(self._key(), 1)
        except RuntimeError:
            self._store = None
            return 1

    def _wait_for_others(self) -> int:
        """How many ranks have reported by the end of OTHERS_S."""
        key = f"hang/{self._num_reports - 1}"
        num = 1
        end_s = time.monotonic() + OTHERS_S
        while self._store is not None and time.monotonic() < end_s:
            try:
                num = self._store.add(key, 0)
                if num >= self._world_size:
                    break
            except RuntimeError:
                self._store = None
            time.sleep(min(0.5, 0.1 * max(1.0, self._world_size / 64)))  # all ranks may ask one store
        return num

    def _say(self, num_reported: int) -> None:
        try:
            reports = read_reports(self._output_dir)
            if len(reports) < num_reported:
                line = (
                    f"{num_reported} ranks have reported, {len(reports)} of them here; bring the folders of "
                    "all machines together and ask python -m aorta.profilers.hang"
                )
            else:
                line = sentence(find(reports))
        except AortaError as error:
            line = str(error)
        print(f"hang: {line}\n  reports in {self._folder}", file=sys.stderr, flush=True)

    def _move_old_reports(self) -> None:
        try:
            move_aside(self._output_dir, (FOLDER,))
        except AortaError as error:
            log.warning("%s", error)

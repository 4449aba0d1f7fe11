"""A thread of every rank that notices when no step ends any more, and calls the other ranks to report.

aorta.instrument enters the Watchdog and calls beat() before each step. On a standstill the thread writes
hang/rank<n>.json; the first rank to report also prints who is waited for (aorta.hang.find), and with
hang.action=abort the process then ends. The main thread may hang in any call and hold any lock, so every
question to a store, a device or a library is asked in a thread of its own, with a limit to the wait.
"""

import faulthandler
import logging
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from aorta.config.structs import HangConfig
from aorta.device.backend import backend_of
from aorta.errors import AortaError
from aorta.files import regular_descriptor
from aorta.hang.find import find, sentence
from aorta.hang.last_calls import CallCounts, LastCalls, with_last_calls
from aorta.hang.meeting import Meeting, MeetingStore
from aorta.hang.report import (
    GroupState,
    HangReport,
    flight_recorder_name,
    read_reports,
    report_name,
    stacks_name,
)
from aorta.hang.standing import (
    cache_device_properties,
    call_stacks,
    flight_record,
    group_states,
    in_debugger,
    launch_stacks,
    main_thread_frames,
    telemetry_sample,
    with_unseen,
)
from aorta.processes import in_thread
from aorta.record.journal import Journal
from aorta.records.endings import lost_a_peer
from aorta.records.files import HANG_FOLDER, call_counts_name, last_calls_name
from aorta.records.run_identity import is_stopped
from aorta.records.schema import Ending
from aorta.records.state import first_line, read_states
from aorta.records.writer import move_aside, write_json
from aorta.steps.notes import CollectiveCall

log = logging.getLogger(__name__)
ABORT_STATUS = 124
"""Exit status with hang.action=abort, as timeout(1) has it."""
POLL_S = 1.0
"""Time between two looks of the thread."""
OTHERS_S = 4.0
"""Longest wait of a rank that reports for the reports of the others."""
SAY_S = 2.0
"""Longest wait for what takes a lock of the main thread: a line on stderr, the ending of the run."""
DEVICE_S = 2.5
"""Longest wait for the device's telemetry."""
LEAVE_S = 3.0
"""Longest wait for the other ranks' last writing before this one ends."""
FLUSH_S = 1.0
"""Longest wait for the recorder to write finished steps."""
REPORT_S = 20.0
"""Time for a whole report: more than all of the above and the flight recorder. A rank beyond it is stuck."""
NOT_RUN_S = 2.0
"""Delay of a look from which on the process is taken not to have run: stopped, say."""
MOST_REMEMBERED, MOST_REMEMBERED_STEPS = 2000, 200
"""Finished calls, and steps, that are kept to tell the usual order."""
LEAST_BY_MEDIAN_S = 10.0
"""Shortest limit that hang.median_factor may give."""
STEPS_FOR_MEDIAN = 10
"""Fewest finished steps for such a limit."""
INTERPRETER_STUCK_S = 2.0
"""Time beyond the limit after which faulthandler acts in place of this module's thread."""
STDERR = 2
"""Number of the process's stderr: sys.stderr may be an object without a file."""


class Watchdog:
    """Context of a run: call beat() before each step. A step costs a clock reading; the thread looks once
    a second."""

    def __init__(
        self,
        hang: HangConfig,
        output_dir: str | Path,
        rank: int,
        world_size: int,
        *,
        recorder: object = None,
        store: MeetingStore | None = None,
        device: torch.device | None = None,
        exit_now: Callable[[int], Any] = os._exit,
    ) -> None:
        """recorder: what notes the collectives; without one the reports hold stacks and steps alone.

        store: shared by the ranks; without one each rank reports by itself.
        """
        self.hang = hang
        self._output_dir = Path(output_dir).absolute()
        self._folder = self._output_dir / HANG_FOLDER
        self._rank, self._world_size = rank, world_size
        self._recorder = recorder
        self._journal: Journal | None = getattr(recorder, "journal", None)
        self._meeting = Meeting(store, world_size, rank)
        self._device = device
        self._exit_now = exit_now
        self._poll_s = min(POLL_S, hang.timeout_s / 5)
        # Written by the main thread, read by the watchdog's. Without a lock, which a main thread that hangs
        # might keep: a reader takes the value of the moment, and _groups does without a deque that changes.
        self._step: int | None = None
        self._num_steps = 0
        self._progress_s = time.monotonic()
        self._durations_s: deque[float] = deque(maxlen=100)
        self._finished_steps: deque[tuple[int, list[CollectiveCall]]] = deque()
        self._num_finished_calls = 0
        self._begun: deque[tuple[int, int]] = deque(maxlen=MOST_REMEMBERED_STEPS)
        """Unix ns at which the latest steps began, and their numbers."""
        self._pause: str | None = None
        self._pause_ended_s = 0.0
        self._last_calls: LastCalls | CallCounts | None = None
        # Used by the watchdog's thread alone.
        self._waiting_step: int | None = None
        """Oldest step that the device has not finished, and when it became so (_device_progress_s)."""
        self._device_progress_s = self._progress_s
        self._was_debugging = False
        self._announced_pause = False
        self._reported_at_step = -1
        """Value of _num_steps at the last report: each standstill is reported once."""
        # The report that is being made: the thread that asks the device amends it while this one waits.
        self._report_now: HangReport | None = None
        self._amending = threading.Lock()
        self._finding: tuple[str, list[int]] | None = None
        """The sentence that is printed and the ranks that it names; on the rank that prints it."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aorta-hang", daemon=True)

    def __enter__(self) -> Self:
        if self.hang.enabled:
            if self._rank == 0:
                self._move_old_reports()
            self._meeting.connect()
            cache_device_properties(self._device)
            self._keep_last_calls()
            self._progress_s = self._device_progress_s = time.monotonic()
            self._arm_faulthandler(self.hang.timeout_s + INTERPRETER_STUCK_S)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._closing.set()
        if self._last_calls is not None and self._journal is not None:
            self._journal.trail = self._journal.trail_ends = None
            # After an error the file stays: the other ranks may still have to find out where this one was.
            if error is None and kind is None:
                self._last_calls.remove()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
            faulthandler.cancel_dump_traceback_later()
            reason = None if error is None else first_line(error)
            if lost_a_peer(reason) and self._num_steps != self._reported_at_step:
                # The rank that is gone cannot say where it was; the others can say what they waited for.
                with suppress(OSError):
                    self._folder.mkdir(parents=True, exist_ok=True)
                report = self._report_now = self._describe(f"the run ended: {reason}", self.limit_s())
                self._write(report)
                self._add_unseen(report)

    def _move_old_reports(self) -> None:
        try:
            move_aside(self._output_dir, (HANG_FOLDER,))
        except AortaError as error:
            log.warning("%s", error)

    def _keep_last_calls(self) -> None:
        """Keep the latest collectives in a file, should this rank end without a report or be stopped.

        On GPUs their number alone: a mismatch ends no process there.
        """
        if self._journal is None:
            return
        on_gpu = self._device is not None and self._device.type != "cpu"
        try:
            if on_gpu:
                self._last_calls = CallCounts(self._output_dir / call_counts_name(self._rank))
            else:
                self._last_calls = LastCalls(self._output_dir / last_calls_name(self._rank))
        except OSError as error:
            # No warning: what else is written to a full disk says so itself, and the watchdog works without.
            log.info("rank %d: its latest collectives are not kept: %s", self._rank, error.strerror)
            return
        self._journal.trail = self._last_calls.note
        self._journal.trail_ends = self._last_calls.forget

    def beat(self, global_step: int) -> None:
        """Note that the rank is about to begin this step."""
        now_s = time.monotonic()
        if self._num_steps:
            self._durations_s.append(now_s - self._last_progress_s())
        journal = self._journal
        if journal is not None and journal.current is not None:
            self._remember(journal.current.global_step, journal.current.calls)
        self._step = global_step
        self._begun.append((time.time_ns(), global_step))
        self._num_steps += 1
        self._progress_s = now_s

    def _remember(self, global_step: int, calls: list[CollectiveCall]) -> None:
        """Keep a finished step: many of them tell the usual order, also of what comes every N steps."""
        steps = self._finished_steps
        steps.append((global_step, calls))
        self._num_finished_calls += len(calls)
        while len(steps) > 1 and (
            self._num_finished_calls > MOST_REMEMBERED or len(steps) > MOST_REMEMBERED_STEPS
        ):
            self._num_finished_calls -= len(steps.popleft()[1])

    @contextmanager
    def pausing(self, activity: str) -> Iterator[None]:
        """Context for work that is no step and may take long; as Recorder.pausing."""
        enclosing, self._pause = self._pause, activity
        try:
            yield
        finally:
            self._pause_ended_s = time.monotonic()
            self._pause = enclosing

    def limit_s(self) -> float:
        """Longest time without progress that is no hang, for what the rank does now."""
        limit_s, factor = self.hang.timeout_s, self.hang.median_factor
        pause = self._announced()
        if pause is not None:
            by_kind = {"checkpoint": self.hang.checkpoint_timeout_s}
            return max(limit_s, by_kind.get(pause, self.hang.pause_timeout_s))
        if self._num_steps <= 1:
            return max(limit_s, self.hang.start_timeout_s or 0.0)
        if factor is None or len(self._durations_s) < STEPS_FOR_MEDIAN:
            return limit_s
        usual_s = statistics.median(self._durations_s)
        return min(limit_s, max(LEAST_BY_MEDIAN_S, factor * usual_s))

    def _announced(self) -> str | None:
        """Pause that this rank is in, by its own word or because a debugger holds it."""
        announced = self._pause or (None if self._journal is None else self._journal.pause)
        return announced or ("debugger session" if self._was_debugging else None)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._device is not None:
                # Or questions about events would open another device.
                backend_of(self._device).set_device(self._device)
            looked_s = time.monotonic()
            while not self._closing.wait(self._poll_s):
                not_run_s = time.monotonic() - looked_s - self._poll_s
                if not_run_s > NOT_RUN_S:
                    self._leave_out_stopped_time(not_run_s)
                self._look()
                looked_s = time.monotonic()
        except Exception:
            faulthandler.cancel_dump_traceback_later()  # nobody would put it off any more
            log.exception("rank %d: the watchdog for hangs stops", self._rank)

    def _look(self) -> None:
        """Report if this rank stands still longer than its limit, or another one reports."""
        self._look_for_debugger()
        limit_s = self.limit_s()
        self._arm_faulthandler(limit_s + INTERPRETER_STUCK_S)  # put off with every look
        self._announce_pause()
        reason = self._standstill(limit_s)
        if reason is not None and self._meeting.waits_for_pause(self._progress_number()):
            limit_s = max(limit_s, self.hang.pause_timeout_s)  # another rank may be what this one waits for
            self._arm_faulthandler(limit_s + INTERPRETER_STUCK_S)
            reason = self._standstill(limit_s)
        if self._num_steps == self._reported_at_step:
            return  # this standstill is reported
        if reason is None and self._meeting.is_called():
            reason = "another rank reports a hang"
        if reason is not None and not self._closing.is_set():
            self._reported_at_step = self._num_steps
            self._arm_faulthandler(REPORT_S)
            try:
                self._report(reason, limit_s)
            except Exception:
                log.exception("rank %d: the report of a hang is not complete", self._rank)
            if self.hang.action == "abort":
                in_thread(self._kill_stopped_ranks, "aorta-hang-kills").join(SAY_S)
                self._write_ending(reason)
                self._exit_now(ABORT_STATUS)

    def _look_for_debugger(self) -> None:
        is_debugging = in_debugger()
        if self._was_debugging and not is_debugging:
            self._pause_ended_s = time.monotonic()
        self._was_debugging = is_debugging

    def _leave_out_stopped_time(self, seconds: float) -> None:
        """Move the clocks of progress on: while this process was stopped, nothing stood still."""
        now_s = time.monotonic()
        self._progress_s = min(now_s, self._progress_s + seconds)
        self._device_progress_s = min(now_s, self._device_progress_s + seconds)

    def _announce_pause(self) -> None:
        is_pausing = self._announced() is not None
        if is_pausing != self._announced_pause:
            self._announced_pause = is_pausing
            self._meeting.count_pause(1 if is_pausing else -1, self._progress_number())

    def _progress_number(self) -> int:
        """Progress of this rank as a number: odd inside a step, even after it."""
        step = None if self._journal is None else self._journal.current
        is_inside = self._journal is None or (step is not None and step.body_end is None)
        return 2 * self._num_steps - (1 if is_inside else 0)

    def _standstill(self, limit_s: float) -> str | None:
        """Reason to report: the host began no step, or the device finished none, within the limit."""
        now_s = time.monotonic()
        first = None
        if self._journal is not None:
            with suppress(IndexError):  # the thread that takes steps out may be faster
                first = self._journal.closed[0].global_step
        if first is None or first != self._waiting_step:
            self._waiting_step, self._device_progress_s = first, now_s
        idle_s = now_s - self._last_progress_s()
        if idle_s > limit_s:
            activity = self._announced()
            return f"no step was begun for {idle_s:.0f} s" + (
                f", in an announced {activity}" if activity else ""
            )
        if now_s - self._device_progress_s > limit_s:
            return f"the device has not finished step {first} for {now_s - self._device_progress_s:.0f} s"
        return None

    def _last_progress_s(self) -> float:
        ended_s = 0.0 if self._journal is None else self._journal.pause_ended_s
        return max(self._progress_s, self._pause_ended_s, ended_s)

    def _arm_faulthandler(self, seconds: float) -> None:
        """Have faulthandler dump all stacks, and end the process on abort, unless this thread runs by then.

        A library that keeps the interpreter lock stops this thread; faulthandler's needs no lock.
        """
        with suppress(AttributeError, ValueError, OSError):  # no such file
            faulthandler.dump_traceback_later(seconds, file=STDERR, exit=self.hang.action == "abort")

    def _write_ending(self, reason: str) -> None:
        """Write finished steps and how the run ends, in threads: the main thread may keep a lock."""
        flush, end = getattr(self._recorder, "flush", None), getattr(self._recorder, "end", None)
        ending_reason, ranks = self._finding or (reason, [])
        ending = Ending(kind="hung", why=ending_reason, ranks=ranks, unix_ns=time.time_ns())
        if end is not None:
            in_thread(lambda: end(ending), "aorta-hang-ends").join(SAY_S)
        if flush is not None:
            in_thread(lambda: flush(FLUSH_S), "aorta-hang-flushes").join(FLUSH_S + 0.5)

    def _kill_stopped_ranks(self) -> None:
        """Kill stopped ranks of this machine (SIGSTOP): they neither end themselves nor heed SIGTERM."""
        own_state = read_states(self._output_dir).get(self._rank)
        for state in read_states(self._output_dir).values():
            process = state.process
            is_peer = own_state is not None and (process.run_id, process.attempt, process.host) == (
                own_state.process.run_id,
                own_state.process.attempt,
                own_state.process.host,
            )
            if is_peer and process.rank != self._rank and is_stopped(process.pid, process.process_start):
                log.warning("rank %d: rank %d is stopped and is killed", self._rank, process.rank)
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)

    # -- the report -----------------------------------------------------------------------------

    def _report(self, reason: str, limit_s: float) -> None:
        """Write the report, call the other ranks, and print who is waited for if this rank is the first."""
        # In order of risk: stacks need no answer of the device; the flight recorder may wait for ever with
        # the interpreter lock. What is known is written before the next question is asked.
        self._write_stacks()
        report = self._report_now = self._describe(reason, limit_s)
        self._write(report)
        self._add_unseen(report)
        adding = in_thread(lambda: self._add_device(report), "aorta-hang-device")
        is_first = self._meeting.count_in() == 1
        num_reported = 1
        if is_first or self.hang.action == "abort":
            num_reported = self._meeting.wait_for_all(OTHERS_S)
            if is_first:  # the main thread may keep the lock of stderr
                in_thread(lambda: self._print_finding(num_reported), "aorta-hang-says").join(SAY_S)
        adding.join(DEVICE_S)
        record = flight_record(self._folder / flight_recorder_name(self._rank))
        launches = launch_stacks(record, report.groups or ())
        if launches:
            self._amend(stacks=[*report.stacks, *launches])
        if self.hang.action == "abort":
            self._meeting.leave_together(num_reported, LEAVE_S)

    def _add_unseen(self, report: HangReport) -> None:
        """Add the collectives of a step that is not recorded, before the others read this report.

        Their number first: torch's flight recorder, which alone knows what they are, may not answer.
        """
        unseen: dict[str, tuple[int, int]] = getattr(self._recorder, "unseen", dict)()
        if not unseen or report.groups is None:
            return
        begun = list(self._begun)
        self._amend(groups=with_unseen(report.groups, unseen, b"", begun))
        record = flight_record()
        if record:
            self._amend(groups=with_unseen(report.groups, unseen, record, begun))

    def _write_stacks(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            descriptor = regular_descriptor(self._folder / stacks_name(self._rank), flags)
            with open(descriptor, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            log.warning("rank %d: cannot write %s: %s", self._rank, self._folder, error.strerror)

    def _write(self, report: HangReport) -> None:
        try:
            write_json(self._folder / report_name(self._rank), report)
        except OSError as error:
            log.warning("rank %d: cannot write %s: %s", self._rank, self._folder, error.strerror)

    def _describe(self, reason: str, limit_s: float) -> HangReport:
        """The report as far as it needs no answer of the device."""
        not_measured = {"device": "not asked yet"}
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
            groups=self._groups(not_measured),
            main_thread=main_thread_frames(),
            stacks=call_stacks(),
            device=None,
            not_measured=not_measured,
        )

    def _groups(self, not_measured: dict[str, str]) -> list[GroupState] | None:
        if self._journal is None:
            not_measured["groups"] = "collectives are not recorded"
            return None
        try:
            has_passed = getattr(self._recorder, "has_passed", None)
            return group_states(self._journal, list(self._finished_steps), has_passed)
        except Exception as error:  # the main thread goes on writing the journal: a report without it, then
            not_measured["groups"] = f"the journal could not be read: {error!r}"
            return None

    def _add_device(self, report: HangReport) -> None:
        device, reason = telemetry_sample(self._device)
        not_measured = {name: reason for name, reason in report.not_measured.items() if name != "device"}
        if reason is not None:
            not_measured["device"] = reason
        self._amend(device=device, not_measured=not_measured)

    def _amend(self, **changes: Any) -> None:
        """Write the report again, with what has become known since."""
        with self._amending:  # the device's thread and the watchdog's may both have news
            assert self._report_now is not None
            self._report_now = msgspec.structs.replace(self._report_now, **changes)
            self._write(self._report_now)

    def _print_finding(self, num_reported: int) -> None:
        """Print who is waited for, by the reports that are here."""
        try:
            reports = read_reports(self._output_dir)
            if len(reports) < num_reported:
                line = (
                    f"{num_reported} ranks have reported, {len(reports)} of them here; bring the folders of "
                    "all machines together and ask python -m aorta.hang"
                )
            else:
                finding = find(with_last_calls(self._output_dir, reports))
                line = sentence(finding)
                self._finding = (line, finding.ranks)
        except AortaError as error:
            line = str(error)
        print(f"hang: {line}\n  reports in {self._folder}", file=sys.stderr, flush=True)

"""Where a recorder's steps go: the folder, the process or thread that writes lines, the device's telemetry.

Output is opened with the recorder, since the folder must be claimed before anything is recorded, and begins
to write at the first step, when the device is known.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from aorta.device.marks import MarkClock
from aorta.device.telemetry import TelemetrySampler
from aorta.record.journal import Journal
from aorta.record.open_steps import MANY_WAITING
from aorta.record.run_folder import Claim, Standing
from aorta.record.sending import (
    Extractor,
    ProcessSink,
    RecordSink,
    SendingThread,
    Telemetry,
    ThreadSink,
    reader_of_kept,
)
from aorta.record.settings import RecorderSettings
from aorta.record.sources import FirstMark, Sources
from aorta.records.files import state_name, unwritten_name
from aorta.records.schema import Ending, RunRecord, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import RunFolder
from aorta.steps.notes import RecordedStep, ResolverSettings
from aorta.steps.unwritten import UnwrittenSteps

logger = logging.getLogger(__name__)


class Output:
    """The output of one rank in one attempt of a run."""

    def __init__(self, folder: Path, claim: Claim, rank: int, world_size: int) -> None:
        self.claim = claim
        self.path = folder
        self.rank, self.world_size = rank, world_size
        self.folder = RunFolder(folder, rank, claim.goes_on)
        self.standing = claim.standing or Standing(folder, claim, rank, world_size)
        self.callbacks: list[Callable[[StepRecord], None]] = []
        self.num_unresolved = self.num_lost = 0
        self._sink: RecordSink | None = None
        self._sending: SendingThread | None = None
        self._unwritten: UnwrittenSteps | None = None
        self._telemetry: TelemetrySampler | None = None
        self._on_device = False

    def write_run(self, run: RunRecord) -> None:
        """Write run.json, which rank 0 does for all."""
        if self.rank == 0:
            self.folder.write_run(run)

    def begin(
        self,
        journal: Journal,
        settings: RecorderSettings,
        sources: Sources,
        clock: MarkClock,
        first_mark: FirstMark,
        anchor: dict[str, int],
    ) -> None:
        """Begin to write: the device is known. anchor: a reading of all clocks."""
        mark, lower_ns, upper_ns = first_mark
        resolver_settings = ResolverSettings(
            rank=self.rank,
            world_size=self.world_size,
            on_device=clock.is_device,
            clock_lower_ns=lower_ns,
            clock_upper_ns=upper_ns,
            unix_minus_monotonic_ns=anchor["unix_ns"] - anchor["monotonic_ns"],
            run_id=self.claim.run_id,
            attempt=self.claim.attempt,
        )
        self._on_device = clock.is_device
        sink = self._sink = self._open_sink(resolver_settings, sources.learner.refute)
        self._start_telemetry(sources.device, settings)
        self._sending = SendingThread(
            journal,
            Extractor(clock, sources.kernels, mark),
            sources.kernels,
            sink,
            self._latest_telemetry,
            lambda: bool(self.callbacks),
            sources.device,
            self.standing.beat,
        )

    def _open_sink(self, settings: ResolverSettings, refuted: Callable[[], None]) -> RecordSink:
        writer = self.folder.steps
        state = self.path / state_name(self.rank)
        self._unwritten = UnwrittenSteps(
            self.path / unwritten_name(self.rank), settings, reader_of_kept(settings.on_device)
        )
        if not settings.on_device:
            return ThreadSink(settings, writer, self._tell, Tally(state, settings.attempt))
        writer.close()  # the file exists and is ours; the other process writes it from here on
        sink = ProcessSink(settings, writer.path, self._tell, state, refuted)
        self.standing.written_by(sink.pid)
        return sink

    def _tell(self, record: StepRecord) -> None:
        for callback in self.callbacks:
            try:
                callback(record)
            except Exception:
                logger.exception("aorta: a record callback failed")

    def keep(self, step: RecordedStep, num_waiting: int) -> None:
        """Keep a step that was just closed, lest this process is killed; wake the sender if need be.

        num_waiting: closed steps that are not written yet, this one included.
        """
        if self._unwritten is None or self._sending is None:
            return
        # A step that is not recorded has its line within half a second; packing it would be most of its cost.
        if step.left_out is None:
            self._unwritten.keep(step, num_before=max(num_waiting - 1, 0))
        # What a recorded step takes is to fall into its block, which is compared with the steps beside it.
        if num_waiting >= MANY_WAITING or (step.left_out is None and not self._on_device):
            self._sending.wake()

    def wake(self) -> None:
        """Have the closed steps written now."""
        if self._sending is not None:
            self._sending.wake()

    # -- the device's telemetry ----------------------------------------------------------------------

    def _start_telemetry(self, device: torch.device | None, settings: RecorderSettings) -> None:
        self._telemetry = TelemetrySampler(
            None if device is None else device.index,
            settings.telemetry_interval_s,
        )
        self._telemetry.start()

    def _latest_telemetry(self) -> Telemetry:
        telemetry = self._telemetry
        if telemetry is None:
            return Telemetry(not_measured={"device": "no sample yet"})
        sample = telemetry.latest()
        reasons = {} if sample is not None else {"device": telemetry.reason or "no sample yet"}
        return Telemetry(device=sample, not_measured=reasons)

    # -- the end -------------------------------------------------------------------------------------

    def finish(self, timeout_s: float) -> None:
        """Write what the device finishes within timeout_s; the rest is counted as lost."""
        sending, telemetry = self._sending, self._telemetry
        if sending is not None:
            sending.close(timeout_s)
            self.num_unresolved, self.num_lost = sending.num_unresolved, sending.num_lost
            if self.num_unresolved:
                logger.warning(
                    "aorta: rank %d: %d steps were still running on the device and are not recorded",
                    self.rank,
                    self.num_unresolved,
                )
        if self._unwritten is not None:
            self._unwritten.close()
        if telemetry is not None:
            telemetry.stop()

    def end(self, ending: Ending) -> None:
        """Note how this process ends; only the first call counts."""
        self.standing.end(ending)

    def close(self) -> None:
        self.folder.close()

    def matched(self) -> Any:
        """Return how collectives fit to kernels, for run.json; after `finish`."""
        kernels = self._sink.kernel_coverage if isinstance(self._sink, ProcessSink) else None
        return None if kernels is None else msgspec.to_builtins(kernels)

"""The driver's kernel records beside a training loop: when they are on, who else wants them, what has come.

    off ──open──▶ on ◀──────────────▶ resting     (steps that are not recorded)
                  │ ▲
    profiler      ▼ │ profiler has stopped, next step
    prepares    yielded

The driver serves one client. torch.profiler takes the buffers when it prepares (in the warm-up of a schedule,
before it is active), so our records are read and given up first. The steps until it has stopped have their
length and their calls: events around collectives would lengthen what the profiler traces. They serve where it
has the records from the first step on.
"""

import gc
import logging
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd import profiler as autograd_profiler

from aorta.device.backend import accelerator
from aorta.device.cupti_faults import known_faults
from aorta.device.kernel_records import KernelRecords, KernelRecordsUnavailable
from aorta.errors import InstrumentError
from aorta.record.interception.replaced import uncompiled

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "on", "off"]
_OFF = "not asked for (kernels='off')"


class KernelSource:
    """The kernel records of one recorder.

    The training thread begins steps and sets marks; the sending thread polls `records`.
    """

    def __init__(self, mode: Kernels) -> None:
        if mode not in ("auto", "on", "off"):
            raise InstrumentError(f"kernels must be 'auto', 'on' or 'off', got {mode!r}")
        self._mode = mode
        self._last_was_recorded = False
        self.records: KernelRecords | None = None
        """What has come, for the sending thread to poll; None: there are none."""
        self._pid = os.getpid()
        self._profiler = ProfilerWatch(self._yield_to_profiler)
        self._yielded = False
        """True: a profiler has the records, or had them until the next step begins."""
        self.tracer: dict[str, Any] = {"tracer_version": None, "known_faults": []}
        """For run.json: the version of what gives the records, what it takes of each launch once it was on,
        and what is known to be wrong in it."""
        self._before_yield: Callable[[], None] | None = None
        self._device_later: torch.device | None = None
        """Device to open once the profiler is done that had the records when the first step began."""
        self.reason: str | None = _OFF if mode == "off" else "no step has begun"
        """Reason why there are no records; None where there are."""
        self.note: str | None = None
        """A limitation of the records that there are."""
        self.num_yields = 0
        """Times that a profiler took the records."""

    # -- on and off ----------------------------------------------------------------------------

    def watch(self, before_yield: Callable[[], None]) -> None:
        """Notice profilers from now on. before_yield: called before the records go to one of them."""
        self._before_yield = before_yield
        if self._mode != "off":
            self._profiler.install()
            self._yielded = self._profiler.is_busy

    def open(self, device: torch.device) -> None:
        """Turn the records on for a device, which is synchronised.

        Raises InstrumentError where they are demanded and cannot be had.
        """
        if self._mode == "off":
            return
        if self._yielded:
            self.reason = "torch.profiler had the driver's records when the first step began"
            self._device_later = device
            return
        self._open(device)

    def _open(self, device: torch.device) -> None:
        devices = accelerator()
        if devices.kernels_unasked is not None and self._mode != "on":
            self.reason = devices.kernels_unasked
            return
        try:
            self.records = devices.kernel_records(device)
        except KernelRecordsUnavailable as error:
            self.reason = str(error)
            if self._mode == "on":
                self._profiler.uninstall()
                raise InstrumentError(f"kernels='on': {error}") from None
            logger.info("kernel records are not used, events are: %s", error)
            return
        version = self.records.version
        self.tracer = {
            "tracer_version": version,
            "tracer_launch_us": self.records.launch_us,
            "known_faults": known_faults(version) if torch.version.hip is None else [],
        }
        self.reason = None
        self.note = devices.kernels_note

    def close(self) -> None:
        """Turn the records off for good; those that have not been polled are lost."""
        self._profiler.uninstall()
        records, self.records = self.records, None
        if records is not None and os.getpid() == self._pid:
            records.stop()
            records.flush(forced=True)
            records.discard()

    # -- steps (training thread) -----------------------------------------------------------------

    def begin_step(self, recorded: bool = True, comes_next: bool = True) -> bool:
        """Turn the records on or off for the step that begins; True: they time it.

        comes_next: the step after it is recorded.
        """
        if self._yielded and not self._profiler.is_busy:
            self._resume()
        if self._yielded or self.records is None:
            return False
        # On from the step before to the step after: work that was queued before may run in the recorded step,
        # and work of the recorded step may run in the next.
        is_needed = recorded or comes_next or self._last_was_recorded
        self._last_was_recorded = recorded
        if is_needed and not self.records.is_on:
            self._start()
        elif not is_needed and self.records.is_on:
            self.records.stop()
        return recorded and self.is_on

    def mark(self, stream: int) -> int:
        """Put a mark on a stream and return its number, 0 where that was not possible."""
        records = self.records
        return records.mark(stream) if records is not None and records.is_on else 0

    @property
    def is_ready(self) -> bool:
        """True where a step that begins now would be timed by the records, as far as is known."""
        return self.records is not None and not (self._yielded and self._profiler.is_busy)

    @property
    def is_lent(self) -> bool:
        """True while a profiler has the records that other steps are timed by."""
        return self._yielded and self.records is not None

    @property
    def is_on(self) -> bool:
        return self.records is not None and self.records.is_on

    def has_passed(self, number: int) -> bool:
        """True once the device has reached a mark, or where nobody can say any more."""
        records = self.records
        return records is None or records.has_passed(number)

    # -- profilers ---------------------------------------------------------------------------------

    def _yield_to_profiler(self) -> None:
        """Give the records up: a profiler is about to take them."""
        if self._yielded:
            return
        if self.records is not None and os.getpid() == self._pid:
            if self._before_yield is not None:
                self._before_yield()
            self.records.yield_buffers()
        self._yielded = True
        self.num_yields += 1

    def _resume(self) -> None:
        """Take the records back, at the start of a step: no profiler has them any more."""
        self._yielded = False
        if self.records is not None:
            self.wake()
        elif self._device_later is not None:
            self._open(self._device_later)

    def pause(self) -> None:
        """Turn the records off between two steps, until `wake`."""
        if self.records is not None and self.records.is_on:
            self.records.stop()

    def wake(self) -> None:
        """Turn the records on again. Waits for the device: nothing unrecorded may run in a recorded step."""
        if self.records is not None and not self._yielded and not self.records.is_on:
            self.records.synchronize()
            self._start()

    def _start(self) -> None:
        assert self.records is not None
        try:
            self.records.start()
        except KernelRecordsUnavailable as error:
            self.reason = str(error)
            self.records = None
            logger.warning("aorta: kernel records ended, events go on: %s", error)


class ProfilerWatch:
    """Notices when torch.profiler takes the device's records, and when it has stopped."""

    def __init__(self, about_to_take: Callable[[], None]) -> None:
        """about_to_take: called before a profiler takes the records."""
        self._about_to_take = about_to_take
        self._originals: dict[str, Any] = {}
        self.is_busy = False
        """True: a profiler has the device's records, or may have."""

    def install(self) -> None:
        """Replace the functions by which torch prepares, starts and stops a profiler."""
        if self._originals:
            return
        self.is_busy = _profiler_has_device()
        watch, activity = self, accelerator().profiler_activity()

        def taking(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(config: Any, activities: Any, *args: Any, **named: Any) -> Any:
                if activity in activities:
                    watch.is_busy = True
                    try:
                        watch._about_to_take()
                    except Exception:  # never the program's profiler's trouble
                        logger.exception("aorta: kernel records could not make room for a profiler")
                return original(config, activities, *args, **named)

            return uncompiled(call)

        def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                try:
                    return original(*args, **named)
                finally:
                    watch.is_busy = False  # the open step stays with events, the next one asks

            return uncompiled(call)

        for name, make in (
            ("_prepare_profiler", taking),
            ("_enable_profiler", taking),
            ("_disable_profiler", stopping),
        ):
            original = getattr(autograd_profiler, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(autograd_profiler, name, make(original))

    def uninstall(self) -> None:
        for name, original in self._originals.items():
            setattr(autograd_profiler, name, original)
        self._originals.clear()


def _profiler_has_device() -> bool:
    """True if a profiler of torch's was prepared or started before ProfilerWatch was installed.

    torch does not tell of one that is prepared, so its objects are looked for, once.
    """
    if torch._C._autograd._profiler_enabled():
        return True
    return any(
        type(candidate) is autograd_profiler.profile
        and candidate.entered
        and candidate.kineto_results is None
        for candidate in gc.get_objects()
    )

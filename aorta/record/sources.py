"""What sees the program: everything that is put on while steps are recorded, and taken off again.

The recorder asks for `install` and `uninstall`; the open steps (open_steps.py) ask what times the step that
begins. Observers are made once and kept while the rest comes and goes.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from aorta.device.backend import CPU, Backend, accelerator
from aorta.device.event_clock import EventClock
from aorta.device.marks import HostClock, MarkClock
from aorta.errors import InstrumentError
from aorta.record.collective_names import ModuleNames
from aorta.record.cpu_observer import CpuObserver
from aorta.record.event_observer import EventObserver
from aorta.record.host import HostWatch, ThreadUse
from aorta.record.interception.stalls import CaptureWatch, StreamWaitPatch
from aorta.record.interception.switch import BackendCounts, Interception
from aorta.record.interception.works import Observer
from aorta.record.journal import Journal
from aorta.record.kernel_source import KernelSource
from aorta.record.learned_calls import Learner
from aorta.record.overhead import NUM_FIRST
from aorta.record.phase_memory import PhaseMemory
from aorta.record.settings import RecorderSettings
from aorta.record.sites import Sites
from aorta.record.stacks import StackSampler
from aorta.steps.notes import Mark

FirstMark = tuple[Mark | None, int, int]
"""The run's first mark, and the monotonic ns between which it passed; None, 0, 0 on a CPU."""


class Sources:
    """The instrument's eyes in one process: collectives, waits, the host and the driver."""

    def __init__(self, journal: Journal, settings: RecorderSettings) -> None:
        self._journal = journal
        self._settings = settings
        self.accelerator: Backend = accelerator()
        self.kernels = KernelSource(settings.kernels)
        self.captures = CaptureWatch()
        self.phase_memory = PhaseMemory(self.accelerator)
        self.host_watch = HostWatch(journal, self.phase_memory, settings.stacks)
        self.module_names = ModuleNames(journal)
        self.sites = Sites(journal)
        self.counts = BackendCounts(journal)
        self.learner = Learner(self.counts.read, self.counts.next_numbers)
        self.thread_use = ThreadUse()
        self.stacks = StackSampler(journal, settings.stacks)
        self.device: torch.device | None = None
        """The device that is recorded; None on a CPU, and before the first step."""
        self.is_on = False
        self.looks = False
        """True while collectives are seen: in steps that are recorded and whose collectives are not known."""
        self._interception: Interception | None = None
        self._observers: dict[str, Observer] = {}
        self._wrap: Callable[[Observer], Observer] | None = None
        self._event_observer: EventObserver | None = None
        self._stream_patch: StreamWaitPatch | None = None

    def wrap_observers(self, wrap: Callable[[Observer], Observer]) -> None:
        """Have `wrap` applied to the observers of collectives. Before `install`."""
        self._wrap = wrap

    # -- on and off ----------------------------------------------------------------------------

    def install(self) -> None:
        """Put on what sees the program. Raises InstrumentError where another recorder of the process has."""
        if Interception._installed is not None:
            raise InstrumentError("this process is instrumented by another recorder: close it first")
        self.is_on = True
        if not self._observers:
            self._make_observers()
        if dist.is_available():
            self._interception = Interception(self._observers)
            self._interception.install()
        self.captures.install()
        self.host_watch.install()
        self._look()
        self.watch_waits(True)
        self.stacks.start()
        self.kernels.wake()

    def uninstall(self) -> None:
        if self.looks:
            self._look_away()
        self.is_on = False
        self.watch_waits(False)
        self.watch_streams(False)
        self.kernels.pause()
        if self._interception is not None:
            self._interception.uninstall()
            self._interception = None
        self.captures.uninstall()
        self.stacks.stop()
        self.host_watch.uninstall()

    @property
    def can_look_away(self) -> bool:
        """True where a step can be recorded without seeing its collectives: they are known, and kernels
        time them."""
        return self.kernels.is_ready and self.learner.is_sure and self.learns

    @property
    def learns(self) -> bool:
        """True where collectives are learned: nobody asks for each one."""
        return self._why_to_see() is None

    def _why_to_see(self) -> str | None:
        """Say why this recorder asks for every collective one by one."""
        if self._settings.placement == "dedicated":
            return "dedicated placement moves collectives"
        if self._wrap is not None:
            return "another observer of this process is told of each"
        return None

    @property
    def why_all_seen(self) -> str | None:
        """Reason why collectives were seen one by one in every recorded step; None: not in all."""
        if self.learner.num_learned:
            return None
        if self.device is None:
            return "there is no device: nothing else tells of collectives"
        if self.kernels.reason is not None:
            return f"there are no kernel records: {self.kernels.reason}"
        return self._why_to_see() or (
            f"too few steps were recorded behind the first {NUM_FIRST}"
            if self.learner.is_sure
            else "too few steps in a row had the same ones, by the backends' counts"
        )

    def look(self) -> None:
        """See collectives again."""
        if self._interception is not None:
            self._interception.wake()
        self._look()

    def look_away(self) -> bool:
        """Take off, between two steps, what is called for each collective. False: not possible now."""
        if self._interception is not None:
            if self._interception.is_entered:
                return False
            self._interception.rest()
        self._look_away()
        return True

    def watch_waits(self, on: bool) -> None:
        """See waits of the host for the device, in steps that are recorded, or see them no more."""
        if not on:
            self.host_watch.leave_waits()
        elif self._event_observer is not None:  # there is a device; torch takes long to say
            self.host_watch.watch_waits()

    def watch_streams(self, on: bool) -> None:
        """See waits of streams, in steps that events time."""
        if self._stream_patch is not None:
            (self._stream_patch.install if on else self._stream_patch.uninstall)()

    def _look(self) -> None:
        self.looks = True
        self.counts.begin()
        self.module_names.install()

    def _look_away(self) -> None:
        self.looks = False
        if self._journal.trail_ends is not None:
            self._journal.trail_ends()
        self.counts.end()
        self.module_names.uninstall()
        self.sites.leave_step()

    def _make_observers(self) -> None:
        self._observers[CPU.dispatch_key] = CpuObserver(self._journal, HostClock())
        if self.accelerator.is_available():
            dedicated = self._settings.placement == "dedicated"
            self._event_observer = EventObserver(self._journal, dedicated, self.captures)
            self._observers[self.accelerator.dispatch_key] = self._event_observer
        if self._wrap is not None:
            self._observers = {key: self._wrap(observer) for key, observer in self._observers.items()}

    # -- the device ----------------------------------------------------------------------------

    def open_device(self, device: torch.device) -> tuple[MarkClock, FirstMark]:
        """Time steps on this device from now on, which is synchronised. Returns its clock."""
        devices = self.accelerator
        if device.type != devices.torch_type:
            return HostClock(), (None, 0, 0)
        if device.index is None:
            device = devices.current_device()
        self.device = device
        events = EventClock(device, devices)
        first_mark, lower_ns, upper_ns = events.first_mark()
        self.kernels.open(device)
        assert self._event_observer is not None
        self._event_observer.attach(events)
        self._stream_patch = StreamWaitPatch(self._journal, events, device.index, self.captures)
        return events, (first_mark, lower_ns, upper_ns)

    def device_in_use(self, was_used_before: bool) -> torch.device:
        """Return the device that the program trains on: chosen in the settings, or found.

        was_used_before: the program had used its devices before the recorder was put on.
        """
        devices, chosen = self.accelerator, self._settings.torch_device
        if chosen is not None:
            return chosen
        uses_device = devices.is_available() and devices.is_initialized()
        uses_device = uses_device and (was_used_before or not _trains_on_cpu(devices))
        return devices.current_device() if uses_device else torch.device(CPU.torch_type)

    def may_use_device_later(self, device: torch.device) -> bool:
        """True where the program was found on the CPU of a machine with a device that it has not used yet."""
        devices = self.accelerator
        return (
            self._settings.torch_device is None
            and device.type != devices.torch_type
            and devices.is_available()
        )

    def is_captured(self) -> bool:
        """True while the caller's current stream is captured into a graph."""
        return bool(self.captures.num_open) and self.captures.is_capturing()


def _trains_on_cpu(devices: Backend) -> bool:
    """True for a process that holds no memory of a GPU, and whose process group, if any, knows none."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != CPU.collectives:
        return False
    return all(devices.reserved_bytes(index) == 0 for index in range(devices.count()))

"""Checks a training process: in windows of two steps, all that is issued goes through aorta.hazards.

A window is whole: what lies before it counts as ordered. After a window with new findings, the following
steps confirm them, one finding a step."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from aorta.check.delays import DeviceTrial, HostTrial, Suspect
from aorta.check.device_order import DeviceOrder
from aorta.check.graphs import Entries, Graphs
from aorta.check.launches import Launches
from aorta.check.names import Named
from aorta.check.numbering import FirstBad, Numbering
from aorta.check.operators import Accesses, Issued, OperatorMode, Plan
from aorta.check.sites import Sites
from aorta.check.works import Works
from aorta.hazards.check import HOST, Hazard, HazardCheck, play, without_events
from aorta.hazards.exceptions import Exceptions
from aorta.hazards.findings import (
    DEFAULT_STREAM,
    NCCL,
    Checked,
    Finding,
    Place,
    Site,
    missing_order,
    write_checked,
)
from aorta.hazards.numbers import Numbered
from aorta.processes import no_garbage_collection
from aorta.record.companions import Accompanied, Cause, Companion

log = logging.getLogger(__name__)

FIRST_STEP = 2
"""Steps before the first window: the first ones allocate and compile."""
WINDOW_STEPS = 2
MAX_NUMBERED = 80
"""Checked steps whose fingerprints are kept: half of them the first, half the last."""
MAX_PRINTS = 40_000
"""Fingerprints that are kept, if those of two windows are not more."""
WRITE_EVERY_S = 10.0
"""Seconds between two writes of what is found where nothing new was."""
MAX_WINDOWS = 8
"""Windows whose hazards are remembered."""
MAX_TRIALS = 4
MAX_SAID = 12
"""Findings that are said while the program runs."""
MAX_SUSPECTS = 24
"""Findings of a process that are delayed."""
HINTS = {
    "": "",
    "early": "the event was recorded too early{}",
    "itself": "the wait{} is for its own stream and orders nothing",
}


class HazardWatch(Companion):
    """Companion of a recorder that checks two steps of every `every`."""

    def __init__(
        self, every: int, confirm: bool = True, exceptions: Exceptions | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """say: takes a line for the user at new findings, on rank 0."""
        self._every = max(every, WINDOW_STEPS)
        self._confirm = confirm
        self._exceptions = Exceptions.shipped() if exceptions is None else exceptions
        self._say = say
        self._num_said = 0
        self._num_steps = 0
        self._next = FIRST_STEP
        """Number of the step with which the next window begins, at the earliest."""
        self._first_of_window: int | None = None
        self._thread = 0
        self._log: list[Any] = []
        """Of tuples, mostly: the garbage collector forgets those, and thousands of lists would set it off."""
        self._num_exactly = 0
        """Operations of the window whose accesses are known."""
        self._sites = Sites()
        self._order: DeviceOrder | None = None
        self._numbering = Numbering(lambda site: self._sites.sites[site].place)
        self._works: Works | None = None
        self._mode: OperatorMode | None = None
        self._launches = Launches(self._around)
        self._graphs = Graphs(self._capture_begins, self._capture_ended, self._replayed)
        self._capture_at: int | None = None
        """Place in the window's log where a capture began."""
        self._trial: DeviceTrial | HostTrial | None = None
        self._trial_began = 0
        self._suspects: list[Suspect] = []
        self._findings: dict[Any, tuple[Finding, Suspect]] = {}
        self._last_stream: Hashable = HOST
        self._first_bad: FirstBad | None = None
        """Looks at every result, once something was not finite."""
        self._stream_names: dict[Hashable, str] = {0: DEFAULT_STREAM, HOST: HOST}
        self._module_names: dict[int, str] = {}
        self._windows: dict[bytes, tuple[list[Hazard], int]] = {}
        """What the last windows had that were not alike, by a digest of their logs."""
        self._pinned: set[int] = set()
        """Addresses of storages in pinned memory that a device has copied."""
        self.checked = Checked(rank=0, steps=[])
        self._numbered_windows: list[Numbered] = []
        self._next_write = 0.0
        self._folder = Path()

    # -- a recorder's life ---------------------------------------------------------------------

    def opened(self, recorder: Accompanied) -> None:
        self.checked.rank, self._folder = recorder.rank, recorder.output_dir
        self._world_size = recorder.world_size
        if torch.cuda.is_available():
            self._graphs.install()

    def step_begins(self, global_step: int) -> None:
        thread = threading.get_ident()
        if self._mode is not None and thread != self._thread:
            return
        if torch._C._current_graph_task_id() != -1:
            return  # a hook of a backward pass, maybe on a thread of autograd's: a window cannot begin there
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if self._first_of_window is not None:
            if number - self._first_of_window < WINDOW_STEPS:
                self._numbering.step = global_step
                self._log.append(["begin_step", global_step])
                self.checked.steps.append(global_step)
                return
            self._end_window()
        elif self._trial is not None:
            # Ranks stay in step where one of them is late for the others.
            may_end = self._trial.is_done and self._order is not None
            if number - self._trial_began < WINDOW_STEPS and not may_end:
                return
            self._end_trial()
        self._thread = thread
        if self._suspects:
            self._begin_trial(number)
        elif number >= self._next:
            self._next = number + self._every
            self._begin_window(number, global_step)

    def closing(self, cause: Cause) -> None:
        if self._first_of_window is not None:
            self._end_window()
        elif self._trial is not None:
            self._end_trial()
        self._graphs.uninstall()
        self._numbering.unhook()
        if self._num_steps:
            self._write(is_urgent=True)

    # -- a window ------------------------------------------------------------------------------

    def _begin_window(self, number: int, global_step: int) -> None:
        self._first_of_window = number
        self._log.clear()
        self._log.append(["begin_step", global_step])
        self.checked.steps.append(global_step)
        self._numbering.step = global_step
        self._listen()

    def _listen(self) -> None:
        if torch.cuda.is_initialized():
            if self._order is None:
                self._order = DeviceOrder(self._log, self._sites.number)
            self._order.listen()
            self._numbering.order = self._order
            self._numbering.is_short = not self._order.has_room()
        if self._works is None:
            entries = self._log if self._order is None else None
            self._works = Works(entries, self._numbering.waited, self._numbering.promised)
        self._works.listen()
        self._numbering.is_on = self._first_of_window is not None and self._trial is None
        self._launches.listen()
        self._mode = OperatorMode(self._around, self._record_stream, self._waited, self._got_pinned)
        self._hurry()
        self._mode.begin()

    def _hurry(self) -> None:
        """Take the short way for operators in which nothing but their bytes is looked at."""
        looks = self._first_bad is not None and self._first_bad.difference is None
        if self._mode is not None and self._trial is None and self._numbering.is_hooked and not looks:
            self._mode.plain = self._plain

    def _stop(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.end()
        self._launches.stop()
        self._numbering.is_on = False
        if self._works is not None:
            self._works.stop()
        if self._order is not None and self._order.is_listening:
            self._order.stop()

    @no_garbage_collection()
    def _end_window(self) -> None:
        self._first_of_window = None
        self._stop()
        known = self._graphs.captured
        graphs = {entry[1] for entry in self._log if entry[0] == "replay"} & set(known)
        hazards, num_operations = self._played([*(["capture", g, known[g]] for g in graphs), *self._log])
        self._count("exactly", self._num_exactly)
        self._num_exactly = 0
        self._log.clear()
        self.checked.num_operations += num_operations
        if self._order is None:
            self._cannot_see(
                "streams and memory of a device, which the process has not used: check it on one"
            )
        places = self._name_things() if hazards else []
        for hazard in hazards:
            at = hazard.address
            self._found(hazard, next((words for start, end, words in places if start <= at < end), ""))
        self._suspects.sort(key=lambda suspect: suspect.following >= 0)  # races first
        self._keep_numbers()
        self._write(is_urgent=bool(hazards))

    def _name_things(self) -> list[tuple[int, int, str]]:
        """Learn what the program calls its modules and streams, and return where its parameters are."""
        named = Named()
        self._module_names = named.modules()
        if self._order is not None:
            for handle, name in named.streams().items():
                self._stream_names.setdefault(handle, f"stream {name}")
        return named.places()

    def _played(self, entries: Entries) -> tuple[list[Hazard], int]:
        """Hazards of a log, and its number of operations. Where an allocator gives a step what it gave the
        one before, windows are alike, and what the last ones have is known."""
        alike = msgspec.msgpack.encode(without_events(entries), enc_hook=repr)
        key = hashlib.blake2b(alike, digest_size=16).digest()
        if key not in self._windows:
            check = play(entries, HazardCheck())
            if len(self._windows) == MAX_WINDOWS:
                del self._windows[next(iter(self._windows))]
            self._windows[key] = list(check.hazards.values()), check.num_operations
        return self._windows[key]

    def _write(self, is_urgent: bool) -> None:
        """Write what is known, unless it can wait: a file takes longer than a checked step."""
        if is_urgent or time.monotonic() >= self._next_write:
            self._next_write = time.monotonic() + WRITE_EVERY_S
            self.checked.calls = [call for numbered in self._numbered_windows for call in numbered.calls]
            self.checked.parameters = [p for numbered in self._numbered_windows for p in numbered.parameters]
            write_checked(self._folder, self.checked)

    def _keep_numbers(self) -> None:
        taken = self._numbering.take(self.checked.rank)
        if self._order is not None and not self._order.sees_memory:
            self._cannot_see("memory freed too early, and wrong numbers: the allocator is not torch's own")
        elif self._numbering.is_short:
            self._cannot_see("wrong numbers where a device has no memory left for fingerprints")
        kept = self._numbered_windows
        kept.append(taken)
        size = max(len(taken.calls) + len(taken.parameters), 1)
        if len(kept) > max(2, min(MAX_NUMBERED // WINDOW_STEPS, MAX_PRINTS // size)):
            del kept[len(kept) // 2]
            self._cannot_see(
                "wrong numbers in the middle of the run: the first and last checked steps are kept"
            )
        numbers = [n for call in taken.calls for n in (*call.inputs, *call.outputs)]
        numbers += [parameter.numbers for parameter in taken.parameters]
        if not all(numbers) and self._first_bad is None:
            self._first_bad = FirstBad(self.checked.rank)

    # -- graphs --------------------------------------------------------------------------------

    def _capture_begins(self) -> bool:
        """Log a capture, in a window or outside of one."""
        if self._trial is not None:
            return False
        if self._first_of_window is None:
            self._log.clear()
            self._listen()
        self._capture_at = len(self._log)
        return True

    def _capture_ended(self) -> Entries:
        if self._first_of_window is None:
            self._stop()
        at, self._capture_at = self._capture_at, None
        captured = self._log[at:]
        del self._log[at:]  # nothing of it ran
        if self._first_of_window is not None:  # allocations have no sizes yet
            captured = [entry for entry in captured if entry[0] not in ("allocate", "free")]
        return captured

    def _replayed(self, graph: int, replay: Callable[[], Any]) -> Any:
        if self._order is None or self._mode is None:
            return replay()
        site = self._sites.number("replay of a graph")
        if self._trial is None:
            self._log.append(["replay", graph, self._order.stream(), site])
            is_known = graph in self._graphs.captured
            self._count("exactly" if is_known else "not at all")
            if not is_known:
                self._cannot_see("what graphs do that were captured before aorta saw the process train")
            return replay()
        issued = Issued("replay of a graph", False)
        issued.site = site
        for entry in self._graphs.captured.get(graph, ()):
            if entry[0] == "launch":
                issued.reads += [(None, access) for access in entry[2]]
                issued.writes += [(None, access) for access in entry[3]]
        return self._trial.issue(issued, replay)

    def _found(self, hazard: Hazard, parameter: str) -> None:
        key = (hazard.kind, hazard.earlier[1], hazard.later[1])
        if key in self._findings:
            known = self._findings[key][0]
            known.count += hazard.count
            known.parameter = known.parameter or parameter
            return
        finding = self._finding(hazard, parameter)
        suspect = Suspect(
            earlier=hazard.earlier[1],
            later=hazard.later[1],
            earlier_stream=hazard.earlier[0],
            is_later_on_host=hazard.later[0] == HOST,
            following=-1 if hazard.following is None else hazard.following,
        )
        self._findings[key] = finding, suspect
        self.checked.findings.append(finding)
        reason = self._exceptions.reason(finding)
        if reason is not None:
            finding.status, finding.reason = "known", reason
        elif hazard.kind == "latent":
            finding.reason = "strikes only where the next allocation gets this memory"
        elif self._confirm and len(self._findings) <= MAX_SUSPECTS:
            self._suspects.append(suspect)
        if finding.status != "known":
            self._tell(finding.kind, finding)

    def _tell(self, what: str, finding: Finding) -> None:
        """Say it while the program runs; on one rank, since most findings are all ranks'."""
        if self._say is not None and self.checked.rank == 0 and self._num_said <= MAX_SAID:
            text = f"{what}: {finding.later.site} {finding.rule} by {finding.earlier.site}"
            self._say(text if self._num_said < MAX_SAID else "there are more findings; the report has them")
            self._num_said += 1

    def _finding(self, hazard: Hazard, parameter: str) -> Finding:
        earlier, later = self._place(*hazard.earlier), self._place(*hazard.later)
        hint, at = hazard.hint
        where = f" {self._sites.sites[at].place}" if isinstance(at, int) and at >= 0 else ""
        return Finding(
            kind=hazard.kind,
            rank=self.checked.rank,
            earlier=earlier,
            later=later,
            following=None
            if hazard.following is None or hazard.following < 0
            else self._sites.sites[hazard.following],
            rule=hazard.rule,
            num_bytes=hazard.num_bytes,
            parameter=parameter,
            missing=missing_order(later.stream, earlier.stream, earlier.site, later.site, hazard.kind),
            hint=HINTS[hint].format(where),
            count=hazard.count,
            first_step=hazard.first_step,
        )

    def _place(self, stream: Hashable, site: Any) -> Place:
        known = Site(operation="not known")
        if isinstance(site, int) and site >= 0:
            module = self._sites.modules.get(site, lambda: None)()
            known = msgspec.structs.replace(
                self._sites.sites[site], module=self._module_names.get(id(module), "")
            )
        return Place(stream=self._stream_name(stream), site=known)

    def _stream_name(self, stream: Hashable) -> str:
        if isinstance(stream, str):
            return "the collective's thread" if stream.startswith("collective ") else stream
        name = self._stream_names.get(stream)
        if name is None:
            number = sum(n.startswith("stream ") for n in self._stream_names.values()) + 1
            name = self._stream_names[stream] = f"stream {number}"
        return name

    # -- confirming ----------------------------------------------------------------------------

    def _begin_trial(self, number: int) -> None:
        suspect, self._trial_began = self._suspects[0], number
        if self._order is not None:
            self._trial = DeviceTrial(suspect, self._order)
        else:
            is_late = suspect.num_trials % max(self._world_size, 1) == self.checked.rank
            self._trial = HostTrial(suspect, is_late, self._is_done, lambda: self._last_stream)
        self._log.clear()
        self._listen()

    def _is_done(self, stream: Hashable) -> bool | None:
        return None if self._works is None else self._works.is_done(stream)

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None
        trial.end()
        self._stop()
        self._log.clear()
        suspect = self._suspects[0]
        most = max(MAX_TRIALS, self._world_size) if self._order is None else MAX_TRIALS
        if not suspect.is_confirmed and suspect.num_delayed and suspect.num_trials < most:
            return
        self._suspects.pop(0)
        finding = next(f for f, s in self._findings.values() if s is suspect)
        if suspect.is_confirmed:
            finding.status = "confirmed"
            self._tell("confirmed", finding)
        elif suspect.is_short:
            finding.reason = "the later operation overtook the delayed one; no memory to compare values"
        elif suspect.is_overtaken:
            finding.reason = "the later operation overtook the delayed one; no value changed"
        elif suspect.num_delayed:
            finding.reason = f"delayed {suspect.num_delayed} times, the later operation never came first"
        else:
            finding.reason = "the operations did not come again to be delayed"
        self._write(is_urgent=True)

    # -- operations ----------------------------------------------------------------------------

    def _around(self, issued: Issued, run: Callable[[], Any]) -> Any:
        """Run an operator and log it."""
        order = self._order if self._order is not None and self._order.is_listening else None
        touched = issued.writes or issued.reads
        tensor = touched[0][0] if touched else None
        issued.site = site = self._sites.number(issued.name, tensor, issued.is_collective)
        trial = self._trial
        if trial is None and self._first_of_window is not None:
            if not self._numbering.is_hooked:
                self._numbering.hook_optimizers()
                self._hurry()
            self._numbering.settle()
            run = self._numbered(issued, run)
        if order is None:
            return self._on_host(issued, run if trial is None else lambda: trial.issue(issued, run))
        outer = order.current, order.is_in_collective
        order.current, order.is_in_collective = site, issued.is_collective
        at = len(self._log)
        try:
            result = run() if trial is None else trial.issue(issued, run)
        finally:
            order.current, order.is_in_collective = outer
        if trial is None:
            self._on_device(issued, order, at)
        return result

    def _plain(self, plan: Plan, args: Any, kwargs: Any) -> Any:
        """Run an operator that is no collective, in a window, and log it: all operators but few come here."""
        order = self._order
        skips_questions = order is not None and not self._pinned
        if plan.is_question and skips_questions and not getattr(args[0], "is_cuda", True):
            return plan.call(*args, **kwargs)  # optimizers ask for each counter of steps, on the host
        reads: Accesses = []
        writes: Accesses = []
        plan.note(args, kwargs, reads, writes)
        touched = writes or reads
        site = self._sites.number(plan.name, touched[0][0] if touched else None)
        if self._numbering.promised_calls:
            self._numbering.settle()
        if order is None:
            result = plan.call(*args, **kwargs)
            if plan.returns:
                plan.note_result(result, reads, writes)
            sides = (tuple([access for _, access in part]) for part in (reads, writes))
            self._log.append(("launch", HOST, *sides, site))
            self._num_exactly += 1
            return result
        outer, order.current = order.current, site
        try:
            result = plan.call(*args, **kwargs)
        finally:
            order.current = outer
        if plan.returns:
            plan.note_result(result, reads, writes)
        entry = self._entry(reads, writes, order, site)
        if entry is not None:
            self._log.append(tuple(entry))
        return result

    def _numbered(self, issued: Issued, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return what runs the operator, with fingerprints before and after it, or a look at its results."""
        if not issued.is_collective:
            bad = self._first_bad
            return run if bad is None or bad.difference is not None else lambda: self._looked_at(issued, run)

        def numbered() -> Any:
            pending = self._numbering.called(issued)
            result = run()
            works = self._works
            if self._order is None and not issued.is_async and works is not None:
                works.finish(result)
            if pending is not None and works is not None:
                stream = self._last_stream if self._order is None else works.stream()
                if self._order is not None and issued.is_async:
                    site = self._sites.sites[issued.site]
                    is_from_python = site.inside.startswith("torch/distributed/")
                    outputs = [t.data_ptr() for t in (result,) if isinstance(t, Tensor)]
                    if not works.issued(stream, result, outputs, is_from_python):
                        # DDP's reducer, if no Python is on the stack of autograd's thread: it waits in the
                        # end of the pass. Somebody's hook may change what comes out before.
                        is_reducer = not (site.where or site.inside)
                        if is_reducer and torch._C._current_graph_task_id() != -1:
                            self._numbering.promise(pending)
                        return result
                self._numbering.issued(pending, stream, result, issued.is_async)
            return result

        return numbered

    def _looked_at(self, issued: Issued, run: Callable[[], Any]) -> Any:
        assert self._first_bad is not None
        result = run()
        self._first_bad.look(issued, str(self._sites.sites[issued.site]), self._numbering.step)
        if self._first_bad.difference is not None:
            self.checked.differences.append(self._first_bad.difference)
        return result

    def _on_device(self, issued: Issued, order: DeviceOrder, at: int) -> None:
        entry = self._entry(issued.reads, issued.writes, order, issued.site)
        if entry is not None:
            is_of_group = issued.is_collective and entry[1] != HOST
            self._log.insert(self._group_stream(entry, at) if is_of_group else len(self._log), entry)

    def _entry(self, reads: Accesses, writes: Accesses, order: DeviceOrder, site: int) -> Any:
        """Entry of an operation of the current stream, or of the host on pinned memory that a device has
        copied; None for what touches neither."""
        on_host: list[tuple[int, Tensor, Any]] = []
        sides: tuple[list[Any], list[Any]] = [], []
        for side, part in enumerate((reads, writes)):
            for tensor, access in part:
                if tensor is None or tensor.is_cuda:
                    sides[side].append(access)
                else:
                    on_host.append((side, tensor, access))
        if sides[0] or sides[1]:
            for side, tensor, access in on_host:
                if tensor.is_pinned():  # the device copies it
                    self._pinned.add(tensor.untyped_storage().data_ptr())
                    sides[side].append(access)
            self._num_exactly += 1
            return ["launch", order.stream(), *map(tuple, sides), site]
        if self._pinned:
            for side, tensor, access in on_host:
                if tensor.untyped_storage().data_ptr() in self._pinned:
                    sides[side].append(access)
            if sides[0] or sides[1]:
                return ["launch", HOST, *sides, site]
        return None

    def _group_stream(self, entry: list[Any], at: int) -> int:
        """Set the stream on which a collective runs, from what it waited for; return its place in the log."""
        current: Hashable = entry[1]
        events = self._log[at:]
        for place, event in enumerate(events):
            if event[0] == "wait" and event[1] != current:
                # Its kernel follows, and then the events that others wait for, more than one of them.
                entry[1] = event[1]
                number = sum(name.startswith(NCCL) for name in self._stream_names.values()) + 1
                self._stream_names.setdefault(event[1], f"{NCCL} {number}")
                return at + place + 1
        records = [i for i, event in enumerate(events) if event[0] == "record" and event[2] == current]
        place = records[0] if records else len(events)
        return at + place

    def _on_host(self, issued: Issued, run: Callable[[], Any]) -> Any:
        stream: Hashable = HOST
        works = self._works
        if issued.is_collective and issued.is_async and works is not None:
            stream = self._last_stream = works.stream()
        result = run()
        reads, writes = ([access for _, access in part] for part in (issued.reads, issued.writes))
        is_seen = True
        if stream != HOST and works is not None:
            is_from_python = self._sites.sites[issued.site].inside.startswith("torch/distributed/")
            is_seen = works.issued(stream, result, [access[0] for access in writes], is_from_python)
        self._log.append(["launch", stream if is_seen else HOST, reads, writes, issued.site])
        self._count("exactly" if is_seen else "without their order")
        if not is_seen:
            self._cannot_see("who waits for collectives that C++ issues on the CPU, such as DDP's")
        return result

    def _record_stream(self, tensor: Tensor, stream: Any) -> None:
        if self._order is not None and tensor.is_cuda:
            handle = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            ).cuda_stream
            self._log.append(["record_stream", tensor.untyped_storage().data_ptr(), handle])

    def _got_pinned(self, tensor: Any) -> None:
        """Log new memory of the host's allocator: it gives none that a stream still uses."""
        if self._order is not None and isinstance(tensor, Tensor) and tensor.numel():
            storage = tensor.untyped_storage()
            self._log.append(["allocate", storage.data_ptr(), storage.nbytes(), HOST])

    def _waited(self, tensor: Tensor) -> None:
        if self._works is not None:
            self._works.waited_for_tensor(tensor.data_ptr())

    def _cannot_see(self, what: str) -> None:
        if what not in self.checked.blind:
            self.checked.blind.append(what)

    def _count(self, how: str, num: int = 1) -> None:
        if num:
            seen = self.checked.seen
            seen[how] = seen.get(how, 0) + num

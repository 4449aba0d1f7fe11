"""What does `aorta run` cost a program that knows nothing of it? All of it off and on, in one process.

    aorta run -o RUN --no-report -- python benchmarks/attached_cost.py                      # a loop of 0.3 ms
    aorta run -o RUN --no-report -- torchrun --nproc_per_node 2 benchmarks/attached_cost.py train.py ARG...

Whole runs of one program scatter by more than aorta costs, so that two of them cannot be compared. Here the
program runs once. Before the first backward pass of an iteration, after every few of them, everything that
aorta put into the process is taken off or put on again: hooks and replaced functions, notes of the host,
samples of the stack, its threads, and the process that writes lines, which is stopped meanwhile. Time passes
for aorta only while it is on, so that its steps go on where they stopped. What stays is what is loaded, and
CUPTI where that is off anyway, unless --parts names it.

Blocks come in pairs, `left_out` (aorta as it is in steps that are left out) and `off`, in random order; once
in a while one of `recorded`, which holds a recorded block with its switches, stands between two of `off`.
Rows: of the time by the device's clock where there is one, else by the host's, of the CPU time of the threads
that launch (cpu_), and of the quickest step of a block by the host's clock (quiet_): the middle of the pairs'
ratios by Hodges and Lehmann, with the interval of Wilcoxon's signed ranks. Times are the slowest rank's.
at_limit adds to left_out the share of steps that the limit records. Beside stands what run.json states, and
what aorta's own threads take.

--plant 0.01 has a hook of ours sleep for so much of a step in blocks of left_out, which must be found; --same
leaves aorta on in both, which must give 1.
"""

import argparse
import atexit
import contextlib
import ctypes
import json
import os
import random
import runpy
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from in_turn import OnTime, launching_ms, middle
from torch.optim.optimizer import register_optimizer_step_post_hook

from aorta.device.kernel_records import cupti_path

PARTS = ("hooks", "notes", "captures", "stacks", "threads", "process")
CUPTI = "cupti"
"""Taken out of the process by cuptiFinalize, and put back by a start of the records: never in a program with
CUDA graphs, which then fails, and one turn in a thousand ends a program whose other threads launch."""
KEPT = {
    "init_process_group",
    "destroy_process_group",
    "excepthook",
    "_exit",
    "__post_init__",
    "start",
    "close",
}
"""Replaced functions that no step calls, and that end the run as it should."""
BEFORE = 48
"""Iterations before the first block: recorded ones at the start, and those that they are compared with."""
RECORDED, AROUND = 8, 3
"""Recorded steps of such a block, and those of its switches."""
COLUMNS = ("", "cpu_", "quiet_")
PATIENCE_S = 30.0


class Switch:
    """Takes off what aorta put into this process, and puts it on again."""

    def __init__(self, attachment: Any, parts: set[str]) -> None:
        self._attachment, self._parts = attachment, parts
        recorder = attachment.session._recorder
        self._sampling, self._journal = recorder._sampling, recorder.journal
        self._sources, self._steps = recorder._sources, recorder.steps
        self.folder = str(recorder.output_dir)  # a run ends with its process group, before this is told
        self._hooks: list[tuple[Any, int, Any]] = []
        self._functions: list[tuple[Any, str, Any, Any]] = []
        self._off_at: tuple[int, ...] | None = None
        self.left: set[str] = set()
        """Replaced functions that could not be taken off: somebody wrapped them."""
        self._on_time: OnTime | None = None
        if "stacks" in parts and self._sources.stacks._thread is not None:
            self._pause_stacks()
        self._gate = threading.Condition()
        self._is_open = True
        if "threads" in parts:
            self._gate_threads()
        self._pid = getattr(recorder._output._sink, "pid", None) if "process" in parts else None
        self._cupti = ctypes.CDLL(str(cupti_path())) if CUPTI in parts else None

    def _pause_stacks(self) -> None:
        from aorta.record import stacks

        sampler = self._sources.stacks
        sampler.stop()
        self._on_time = OnTime()
        self._on_time.switch(True)
        sampler._stopping = self._on_time
        sampler._thread = threading.Thread(target=sampler._run, name="aorta-stacks", daemon=True)
        stacks.CPU_SHARE /= 2  # it is on half of the time
        sampler._thread.start()

    def _gate_threads(self) -> None:
        """Let threads of aorta sleep on after each wait while they are off."""
        original = threading.Event.wait

        def wait(event: threading.Event, timeout: float | None = None) -> bool:
            result = original(event, timeout)
            if not self._is_open and threading.current_thread().name.startswith("aorta-"):
                with self._gate:
                    self._gate.wait_for(lambda: self._is_open)
            return result

        threading.Event.wait = wait  # type: ignore[assignment, method-assign]

    @property
    def can(self) -> bool:
        """True within a step that is left out, in which nothing else is put on or taken off."""
        session, step = self._attachment.session, self._journal.current
        is_plain = step is not None and step.left_out is not None and self._steps._is_plain
        return (
            is_plain and session._open is not None and session.model_calls is None and session._train is None
        )

    def record_next(self) -> None:
        """Have steps recorded from the step after the next one on."""
        first = self._sampling._place + 2
        places = range(first, first + RECORDED)
        self._sampling._is_planned = lambda place: place in places
        self._sampling._goes_until = -1

    def record_none(self) -> None:
        self._sampling._is_planned = lambda place: False

    def off(self) -> None:
        if self._cupti is not None:
            self._sources.kernels.records.yield_buffers()  # waits for the device
            if code := self._cupti.cuptiFinalize():
                raise SystemExit(f"cuptiFinalize: {code}")
        self._off_at = self._clocks()
        self._is_open = False
        if self._on_time is not None:
            self._on_time.switch(False)
        if self._pid is not None:
            os.kill(self._pid, signal.SIGSTOP)
        watch = self._sources.host_watch
        if self._parts & {"hooks", "notes"}:
            watch.uninstall()
        if self._parts & {"hooks", "captures"}:
            self._sources.captures.uninstall()
        if "hooks" in self._parts:
            self._hooks_off()
            if "notes" not in self._parts:
                watch.install()
            if "captures" not in self._parts:
                self._sources.captures.install()

    def on(self) -> None:
        if self._off_at is None:
            return
        if self._cupti is not None:
            self._sources.kernels.records.start()
            self._sources.kernels.records.stop()
        watch = self._sources.host_watch
        if "hooks" in self._parts:
            self._sources.captures.uninstall()
            watch.uninstall()
            self._hooks_on()
        watch.install()
        self._sources.captures.install()
        if self._pid is not None:
            os.kill(self._pid, signal.SIGCONT)
        if self._on_time is not None:
            self._on_time.switch(True)
        with self._gate:
            self._is_open = True
            self._gate.notify_all()
        before, self._off_at = self._off_at, None
        if "hooks" in self._parts:
            self._time_stood_still(*(now - then for now, then in zip(self._clocks(), before, strict=True)))

    def _hooks_off(self) -> None:
        for handle in self._attachment._handles:
            hooks = handle.hooks_dict_ref()
            self._hooks.append((hooks, handle.id, hooks.pop(handle.id)))
        for owner, name, original, ours in reversed(self._attachment._restore):
            if name in KEPT:
                continue
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
                self._functions.append((owner, name, original, ours))
            else:
                self.left.add(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")

    def _hooks_on(self) -> None:
        for hooks, number, hook in self._hooks:
            hooks[number] = hook
        for owner, name, original, ours in reversed(self._functions):
            if vars(owner).get(name) is original:
                setattr(owner, name, ours)
        self._hooks.clear()
        self._functions.clear()

    def _clocks(self) -> tuple[int, ...]:
        _, cpu_ns, ready_ns, *_ = self._sources.thread_use.read(with_process=False, with_faults=False)
        return (
            time.monotonic_ns(),
            cpu_ns,
            ready_ns or 0,
            time.process_time_ns(),
            self._sampling.own_threads_ns(),
        )

    def _time_stood_still(self, ns: int, cpu_ns: int, ready_ns: int, process_ns: int, own_ns: int) -> None:
        """Have the open step, and who measures it, know nothing of what has passed."""
        from aorta.steps.notes import Mark

        step, sampling = self._journal.current, self._sampling
        assert step is not None
        step.start = Mark(step.start.host_ns + ns)
        step.host_start_ns += ns
        if step.use_at_start is not None:
            thread, used_ns, waited_ns, of_process_ns, *_ = step.use_at_start
            waited_ns = None if waited_ns is None else waited_ns + ready_ns
            of_process_ns = None if of_process_ns is None else of_process_ns + process_ns
            step.use_at_start = thread, used_ns + cpu_ns, waited_ns, of_process_ns, None, None
        step.host_notes[:] = [
            msgspec.structs.replace(note, start_ns=note.start_ns + ns, end_ns=note.end_ns + ns)
            for note in step.host_notes
        ]
        sampling._began_ns += ns
        sampling._began_cpu_ns += process_ns
        sampling._goes_until_ns += ns
        sampling._decided_ns += ns
        if sampling._threads_ns is not None:
            sampling._threads_ns += own_ns


Reading = tuple[Any, int, float]
"""An event of the device, or None; the host's clock; CPU time of the threads that launch in ms."""


class Turns:
    """Counts iterations, and switches at the ends of blocks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._stepped = False
        self._times_ns: list[int] = []
        self._switch: Switch | None = None
        self._plan: list[tuple[int, str]] = []
        """Blocks to come: the number of their set, and their kind."""
        self._num_sets = self._num_iterations = 0
        self._block: tuple[int, str] | None = None
        self._is_off = self._is_over = False
        self._remaining = 0
        self._start: Reading | None = None
        self._plant_ns = self._num_on = 0
        self._planted_ns: list[int] = []
        self._threads_ms: dict[str, float] = {}
        """CPU time of aorta's own threads, before the first block."""
        self._rows: list[tuple[int, str, Reading, Reading, int, int]] = []
        self._found: dict[str, Any] = {}

    def install(self) -> None:
        original = torch.autograd.backward

        def backward(*args: Any, **named: Any) -> None:
            if self._stepped:
                self._stepped = False
                if not self._is_over:
                    self._iteration_ended()
            original(*args, **named)

        torch.autograd.backward = backward

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._stepped = True

        register_optimizer_step_post_hook(stepped)

    def _iteration_ended(self) -> None:
        self._num_iterations += 1
        self._times_ns.append(time.perf_counter_ns())
        if self._num_iterations < BEFORE:
            return
        if self._switch is None:
            self._begin()
        else:
            self._num_on += not self._is_off
            self._remaining -= 1
            if self._remaining == 0:
                self._block_ended()
        if self._is_over:
            return
        if self._remaining == self._num_timed:
            self._start, self._times_ns = self._reading(), [time.perf_counter_ns()]
        if self._plant_ns and self._block is not None and self._block[1] == "left_out":
            began_ns = time.perf_counter_ns()
            time.sleep(self._plant_ns / 1e9)
            self._planted_ns.append(time.perf_counter_ns() - began_ns)

    def _begin(self) -> None:
        from aorta.attach import hooks

        attachment = hooks.attachment
        if attachment is None or attachment.session is None or attachment.session._recorder is None:
            raise SystemExit("attached_cost.py: run this under `aorta run`, without a recorder of its own")
        if attachment.session._recorder._sampling.limit is None:
            raise SystemExit("attached_cost.py: not with --overhead off, which leaves no step out")
        self._switch = Switch(attachment, set(self._options.parts))
        self._switch.record_none()
        usual_ns = statistics.median(np.diff(self._times_ns[-32:]).tolist())
        self._plant_ns = int(self._options.plant * usual_ns)
        self._threads_ms = threads_ms()
        self._next_block()

    @property
    def _num_timed(self) -> int:
        is_recorded = self._block is not None and self._block[1] == "recorded"
        return RECORDED + AROUND if is_recorded else self._options.block - self._options.cold

    def _block_ended(self) -> None:
        assert self._block is not None
        assert self._start is not None
        quiet_ns = int(min(np.diff(self._times_ns)))
        self._rows.append((*self._block, self._start, self._reading(), self._num_timed, quiet_ns))
        if 0 < self._options.steps <= self._num_iterations - BEFORE:
            self.close()
        else:
            self._next_block()

    def _next_block(self) -> None:
        assert self._switch is not None
        if not self._plan:
            self._num_sets += 1
            every = self._options.recorded_every
            kinds = ["left_out", "off"]
            self._random.shuffle(kinds)
            if every and self._num_sets % every == 0:
                kinds = ["off", "recorded", "off"]
            self._plan = [(self._num_sets, kind) for kind in kinds]
        number, kind = self._plan.pop(0)
        wants_off = kind == "off" and not self._options.same
        if wants_off != self._is_off:
            if not self._is_off and not self._switch.can:
                kind = "cannot"
            else:
                (self._switch.off if wants_off else self._switch.on)()
                self._is_off = wants_off
        if kind == "recorded":
            if self._switch.can:
                self._switch.record_next()
            else:
                kind = "cannot"
        self._block = number, kind
        self._remaining = self._num_timed + (0 if kind == "recorded" else self._options.cold)

    def _reading(self) -> Reading:
        event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event, time.perf_counter_ns(), sum(launching_ms().values())

    def close_before_groups(self) -> None:
        """Close before the process groups are destroyed: the run ends with them."""
        destroy = torch.distributed.destroy_process_group

        def destroy_process_group(*args: Any, **options: Any) -> None:
            self.close()
            destroy(*args, **options)

        torch.distributed.destroy_process_group = destroy_process_group

    def close(self) -> None:
        """Put everything on for the rest of the run, and keep what was measured."""
        switch = self._switch
        if self._is_over or switch is None:
            return
        self._is_over = True
        switch.on()
        switch.record_none()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        meter = switch._sampling.meter
        self._found = {
            "folder": switch.folder,
            "rank": int(os.environ.get("RANK", 0)),
            "world_size": int(os.environ.get("WORLD_SIZE", 1)),
            "rows": [row_of(*row) for row in self._rows],
            "left": sorted(switch.left),
            "planted_ms": statistics.median(self._planted_ns) / 1e6 if self._planted_ns else 0.0,
            "threads_ms": {
                name: (ms - self._threads_ms.get(name, 0.0)) / max(self._num_on, 1)
                for name, ms in threads_ms().items()
            },
            "every": meter.chosen_every(switch._sampling.limit),
            "stated": msgspec.to_builtins(switch._sampling.record()),
        }

    def tell(self) -> None:
        """Write what this rank has; rank 0 waits for the others and prints."""
        self.close()
        found, output = self._found, self._options.output
        if not found:
            print("attached_cost.py: too few iterations", file=sys.stderr)
            return
        folder = Path(output or found["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"attached_cost_{found['rank']}.json"
        own.with_suffix(".tmp").write_text(json.dumps(found))
        own.with_suffix(".tmp").rename(own)
        if found["rank"] == 0:
            paths = [folder / f"attached_cost_{rank}.json" for rank in range(found["world_size"])]
            until_s = time.monotonic() + PATIENCE_S
            while not all(path.exists() for path in paths) and time.monotonic() < until_s:
                time.sleep(0.1)
            print(text_of([json.loads(path.read_text()) for path in paths if path.exists()]), flush=True)


def threads_ms() -> dict[str, float]:
    """CPU time so far of aorta's own threads, by name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.name.startswith("aorta-") and thread.native_id is not None:
            with contextlib.suppress(OSError):  # it has just ended
                ms = time.clock_gettime_ns((~thread.native_id << 3) | 6) / 1e6
                found[thread.name] = found.get(thread.name, 0.0) + ms
    return found


def row_of(
    number: int, kind: str, start: Reading, end: Reading, num_steps: int, quiet_ns: int
) -> tuple[int, str, float, float, float]:
    """Set, kind, and ms a step by COLUMNS."""
    ms = (end[1] - start[1]) / 1e6
    if start[0] is not None and end[0] is not None:
        ms = start[0].elapsed_time(end[0])
    return number, kind, ms / num_steps, (end[2] - start[2]) / num_steps, quiet_ns / 1e6


def ratios_of(ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """Ratios to `off` by kind, [pair, column], and the median step of `off` in ms."""
    sets: dict[int, list[tuple[str, Any]]] = {}
    for of_ranks in zip(*(rank["rows"] for rank in ranks), strict=False):
        numbers, kinds = {row[0] for row in of_ranks}, {row[1] for row in of_ranks}
        values = np.array([row[2:] for row in of_ranks])
        value = values.mean(axis=0)
        value[0] = values[:, 0].max()
        sets.setdefault(min(numbers), []).append((kinds.pop() if len(kinds) == 1 else "cannot", value))
    found: dict[str, list[Any]] = {"left_out": [], "recorded": []}
    off_ms = []
    for blocks in sets.values():
        off = [value for kind, value in blocks if kind == "off"]
        off_ms += [value[0] for value in off]
        names = sorted(kind for kind, _ in blocks)
        if names == ["left_out", "off"]:
            found["left_out"] += [value / off[0] for kind, value in blocks if kind == "left_out"]
        elif names == ["off", "off", "recorded"]:
            ratio = next(value for kind, value in blocks if kind == "recorded") / np.mean(off, axis=0)
            found["recorded"].append(1 + (ratio - 1) * (RECORDED + AROUND) / RECORDED)
    return {kind: np.array(values) for kind, values in found.items() if len(values) > 5}, float(
        np.median(off_ms)
    )


def text_of(ranks: list[dict[str, Any]]) -> str:
    ratios, off_ms = ratios_of(ranks)
    quiet_ms = float(np.median([row[4] for rank in ranks for row in rank["rows"] if row[1] == "off"]))
    lines = [f"off: {off_ms:.3f} ms a step, {len(ranks)} ranks"]
    planted_ms = max(rank["planted_ms"] for rank in ranks)
    if planted_ms:
        lines[0] += f"; planted: {planted_ms:.3f} ms, which is {1 + planted_ms / off_ms:.4f}"
        lines[0] += f" of them, and {1 + planted_ms / quiet_ms:.4f} of the quickest"
    ends: dict[str, Any] = {}
    for kind, values in ratios.items():
        texts = []
        for column, what in enumerate(COLUMNS):
            if kind == "recorded" and what == "quiet_":
                continue
            ends[what + kind] = middle(values[:, column])
            found, low, high = ends[what + kind]
            texts.append(f"{what or 'time '}{found:.4f} [{low:.4f}, {high:.4f}]")
        lines.append(f"{kind:9s} {'  '.join(texts)}  {len(values)} pairs")
    stated, every = ranks[0]["stated"], ranks[0]["every"]
    if "left_out" in ratios and "recorded" in ratios:
        for what in COLUMNS[:2]:
            left_out, recorded = ends[what + "left_out"], ends[what + "recorded"]
            mixed = [
                (1 - 1 / every) * one + other / every for one, other in zip(left_out, recorded, strict=True)
            ]
            lines.append(
                f"at_limit  {what or 'time '}{mixed[0]:.4f} [{mixed[1]:.4f}, {mixed[2]:.4f}], every {every}"
            )
    low, high = stated["always_on_interval"] or (None, None)
    if stated["always_on"] is not None and low is not None and high is not None:
        lines.append(
            f"run.json states: always on {stated['always_on']:.4f} [{low:.4f}, {high:.4f}], a recorded step"
            f" {stated['step_ms'] or 0:.3f} ms {[round(end, 3) for end in stated['step_interval_ms'] or ()]}"
        )
    used = sorted(ranks[0]["threads_ms"].items(), key=lambda entry: -entry[1])
    lines.append("its threads, ms of CPU a step: " + ", ".join(f"{name} {ms:.3f}" for name, ms in used))
    left = sorted({name for rank in ranks for name in rank["left"]})
    if left:
        lines.append(f"left on, since the program wrapped it: {', '.join(left)}")
    return "\n".join(lines)


def short_loop() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = torch.nn.Linear(256, 256), torch.randn(32, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(40_000):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--block", type=int, help="iterations in a block (1; 120 of the own loop)")
    parser.add_argument("--cold", type=int, help="of these, at the begin, not timed (0; 20)")
    parser.add_argument(
        "--recorded-every", type=int, default=16, help="one set of so many has a recorded block"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of blocks, on all ranks the same")
    parser.add_argument("--steps", type=int, default=0, help="iterations in blocks; 0: to the program's end")
    parser.add_argument(
        "--parts", nargs="+", default=list(PARTS), choices=(*PARTS, CUPTI), help="what is turned off"
    )
    parser.add_argument("--same", action="store_true", help="nothing is turned off")
    parser.add_argument("--plant", type=float, default=0.0, help="share of a step that left_out takes longer")
    parser.add_argument("--output", help="folder; else that of the run")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="print what these files of ranks say")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script and its arguments")
    options = parser.parse_args()
    if options.read:
        print(text_of([json.loads(Path(path).read_text()) for path in options.read]))
        return
    own = not options.program
    options.block = options.block or (120 if own else 1)
    options.cold = (20 if own else 0) if options.cold is None else options.cold
    turns = Turns(options)
    turns.install()
    atexit.register(turns.tell)
    if own:
        short_loop()
    else:
        turns.close_before_groups()
        sys.argv = options.program
        sys.path[0] = str(Path(options.program[0]).absolute().parent)
        with contextlib.suppress(SystemExit):
            runpy.run_path(options.program[0], run_name="__main__")
    turns.close()


if __name__ == "__main__":
    main()

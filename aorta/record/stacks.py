"""Samples the stack of the thread that trains, a few times a second, on a thread of its own.

A sample walks the frames, finds its node in a tree of all stacks so far (stack_tree.py), and asks the kernel
whether the thread runs.
"""

import os
import random
import threading
import time
from pathlib import Path

from aorta.files import regular_descriptor
from aorta.record.journal import Journal
from aorta.record.lock_holder import LockWatch, number_of
from aorta.record.prompt_lock import Stopping, held_ns, waits_soon
from aorta.record.stack_tree import PHASE, StackTree, frames_of
from aorta.record.thread_state import ThreadState
from aorta.records.seal import encoded, sealed
from aorta.records.stacks import DOING, NO_STEP, PLACES, StackChunk, StackSample
from aorta.steps.notes import RecordedStep

FIRST_PERIOD_S, NUM_FIRST, PERIOD_S = 0.02, 100, 0.05
"""Samples come no faster than that."""
CPU_SHARE = 0.001
"""Part of a core that sampling may take; the thread that trains waits as long."""
BURST_CPU_S, EARLY_SHARE, EARLY_CPU_S = 0.008, 0.0012, 0.02
"""A short run needs an answer too, from samples of all of it: so much at once, then this part of a core, as
long as that is no more than the last of these and half of CPU_SHARE, made up for within 40 s."""
GLANCE_S = 0.1
"""How often it is looked, in steps of first uses, whether these are over."""
DEBT_S = 0.002
"""CPU time above or below what is allowed, at which samples come half as often, or as fast as they may."""
LONG_STEP, AGAIN, MOST_AGAIN = 2.0, 0.5, 4
"""In a step that has gone on for so many mean steps when it is looked at, it is looked at again after this
part of its time so far, and so on: a long call that is rare has samples enough to tell its line."""
AGAIN_SHARE = 0.0005
"""Part of a core that this may take beside CPU_SHARE."""
MIN_STEPS = 4
"""That tell how long a step is."""
NUM_WARM = 3
"""Steps of a run in which samples are of first uses, and are not judged."""
MANY = 36_000
"""Samples (half an hour of them) after which they come more rarely the longer the run is: from then on each
doubling of its length adds about 25,000."""
LONGEST_S = 1.0
"""Time that one sample may stand for: a stopped process stood still."""
FLUSH_S = 5.0
MOST_BYTES = 16 << 20
"""Of a process's lines in the file."""

_LOCKED_OUT = DOING.index("locked_out")
_BODY, _BEHIND_BODY, _NO_STEP = range(len(PLACES))
_NEEDS_LOCK = frozenset(PHASE[name] for name in ("rest", "forward", "optimizer"))
"""Phases in which a function of torch neither waits for others nor goes on for long without the lock."""
MOST_WAITING = 200
"""Limit of samples that wait to be told from those of an evaluation: 10 s, which a killed process loses."""
_Key = tuple[int, int, int, int, bool, int]
"""Global step, place, phase, what the thread did, whether a backward pass had ended, node of the tree."""


class StackSampler:
    """Samples from `start` to `stop`, which may follow one another several times."""

    def __init__(self, journal: Journal, is_wanted: bool = True) -> None:
        self._journal = journal
        self._is_wanted = is_wanted
        self._tree = StackTree()
        self._path: Path | None = None
        self._attempt = 0
        self._run_id: str | None = None
        self._num_lines = 0
        self._num_bytes = 0
        self._sums: dict[_Key, int] = {}
        self._waiting: list[tuple[int, _Key, int]] = []
        """Samples that may turn out to be of an evaluation: monotonic ns, what they add to, and us."""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Lock()
        """Held while the thread shall run: to wait for a lock takes less than to wait for an event."""
        self._trains = threading.main_thread().ident or 0
        """The thread that was seen to train last."""
        self._lock: LockWatch | None = None
        self._state: ThreadState | None = None
        self._random = random.Random()  # of its own: the program's numbers stay the same
        self._num_samples = 0
        self._elapsed_s = 0.0
        self._cpu_s = self._again_cpu_s = 0.0
        self._dearest_s = 0.0
        """CPU time of the sample that took most: of what was used first, or of a collection of garbage that
        was due, which is no cost of sampling and must not keep the later ones from being taken."""
        self._looks: list[tuple[int, _Key, float]] = []
        """The last sample and those taken again in its step, which share its time: monotonic ns, what each is
        added to, and its part of the time."""
        self._look_s = 0.0
        self._looked_at_ns = 0
        """Start of the step that these are in; 0 of none."""
        self._first_step = 0, 0
        """Of steps whose mean length is known: the first one's number and start."""
        self._pid = os.getpid()

    def write_to(self, path: Path, run_id: str | None = None, attempt: int = 0) -> None:
        """Append lines to this file. Without one nothing is sampled."""
        self._path, self._run_id, self._attempt = path, run_id, attempt

    def start(self) -> None:
        """Begin, or go on, to sample."""
        if not self._is_wanted or self._path is None or self._thread is not None:
            return
        self._pid = os.getpid()
        self._stopping = threading.Lock()
        self._stopping.acquire()
        self._thread = threading.Thread(target=self._run, name="aorta-stacks", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End, and write what there is. Does nothing in a forked child, which has no such thread."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        self._stopping.release()
        thread.join(timeout_s)

    def _run(self) -> None:
        stopping, path = self._stopping, self._path
        assert path is not None
        began_s, cpu_before_s = time.monotonic(), self._cpu_s
        last_s = flushed_s = began_s
        elapsed_before_s = self._elapsed_s
        try:
            while True:
                wait_s = self._period_s() * self._random.uniform(0.5, 1.5)
                wait_s = self._first_uses_pass(wait_s, stopping)
                wait_s = self._look_again(wait_s, stopping)
                if self._lock is not None:
                    self._lock.sleep_begins()
                if stopping.acquire(timeout=wait_s):
                    break
                holder = None if self._lock is None else self._lock.holder(int(1e9 * wait_s))
                is_seen = self._lock is not None and self._lock.late_ns > held_ns()
                if holder is None and not is_seen and self._stops_soon(stopping):
                    break
                now_s = time.monotonic()
                self._sample(min(now_s - last_s, LONGEST_S), stopping, holder)
                last_s = now_s
                self._num_samples += 1
                self._elapsed_s = elapsed_before_s + now_s - began_s
                cpu_s = cpu_before_s + time.thread_time()
                self._dearest_s = max(self._dearest_s, cpu_s - self._cpu_s)
                self._cpu_s = cpu_s
                if now_s - flushed_s >= FLUSH_S:
                    flushed_s = now_s
                    self._flush(path)
            self._share_out()
            self._add(all_of_them=True)
            self._flush(path)
        except Exception:
            self._sums.clear()  # training goes on without stacks; the file says how far they reach
        finally:
            self._close_lock()

    def _period_s(self) -> float:
        if not self._num_samples:
            return FIRST_PERIOD_S
        period_s = FIRST_PERIOD_S if self._num_samples < NUM_FIRST else PERIOD_S
        period_s = max(period_s, self._elapsed_s / MANY)
        allowed_s, share = _allowed(self._elapsed_s)
        cpu_s = self._cpu_s - self._again_cpu_s
        if self._dearest_s and self._num_samples > 1:
            cpu_s = (cpu_s - self._dearest_s) * self._num_samples / (self._num_samples - 1)
        # Evenly: a sample that stands for a longer time tells no more than another one.
        even_s = cpu_s / self._num_samples / share
        # What may be taken at once is for steps that are judged.
        fewest = 1.0 if self._is_first_use() else 0.0
        return max(period_s, even_s * min(max(1 + (cpu_s - allowed_s) / DEBT_S, fewest), 2.0))

    def _first_uses_pass(self, wait_s: float, stopping: threading.Lock) -> float:
        """Wait for the part of this time that is in first uses; what is left of it, or of the shorter one
        that holds behind them."""
        while wait_s > GLANCE_S and self._is_first_use():
            if stopping.acquire(timeout=GLANCE_S):
                stopping.release()  # for the wait that follows, which ends at once
                break
            wait_s -= GLANCE_S
            if not self._is_first_use():
                return min(wait_s, self._period_s())
        return wait_s

    def _look_again(self, wait_s: float, stopping: threading.Lock) -> float:
        """Take more samples of a long step, in the time until the next one is due; what is left of it."""
        while len(self._looks) <= MOST_AGAIN and self._again_cpu_s <= AGAIN_SHARE * self._elapsed_s:
            again_s = self._again_s()
            if not 0 < again_s < wait_s:
                break
            began_s, cpu_s = time.monotonic(), time.thread_time()
            if stopping.acquire(timeout=again_s) or self._stops_soon(stopping):
                stopping.release()  # for the wait that follows, which ends at once
                break
            if self._is_long():  # still the same one
                self._sample(time.monotonic() - began_s, stopping, None, is_again=True)
            wait_s = max(wait_s - (time.monotonic() - began_s), 0.0)
            self._again_cpu_s += time.thread_time() - cpu_s
        return wait_s

    def _stops_soon(self, stopping: Stopping) -> bool:
        """Wait for the moment before a sample. Not beside threads that run: they and the one that trains
        would change places more often, and who holds the lock is found by a wait that is late. Not before
        steps are as all are: to load and to compile holds the lock for long, and each such wait for it would
        take as much CPU time as many samples."""
        is_alone = self._lock is not None and self._lock.is_alone and not self._is_first_use()
        return is_alone and waits_soon(stopping, self._random)

    def _is_first_use(self) -> bool:
        step = self._journal.current
        return step is not None and step.global_step < NUM_WARM

    def _again_s(self) -> float:
        """After which time the step is looked at again; 0 of one that is not long."""
        return AGAIN * (time.monotonic_ns() - self._looked_at_ns) / 1e9 if self._is_long() else 0.0

    def _is_long(self) -> bool:
        """Whether the step of the last sample goes on, for longer than others."""
        step = self._journal.current
        if step is None or not self._looked_at_ns or step.host_start_ns != self._looked_at_ns:
            return False
        number, start_ns = self._first_step
        num = step.global_step - number
        if not start_ns or num < 0:
            self._first_step = step.global_step, step.host_start_ns
        mean_ns = (step.host_start_ns - start_ns) / max(num, 1)
        return num >= MIN_STEPS and time.monotonic_ns() - step.host_start_ns > LONG_STEP * mean_ns

    def _sample(
        self, weight_s: float, stopping: threading.Lock, holder: int | None, is_again: bool = False
    ) -> None:
        """is_again: the last sample's step, of whose time it takes a part as long as weight_s."""
        step = self._journal.current
        if is_again and (step is None or step.host_start_ns != self._looked_at_ns):
            return
        thread = self._trains = step.thread if step is not None else self._trains
        frames = frames_of(thread, self._tree)
        if not frames:
            return
        place, number, is_behind = _where(step)
        began_ns = time.monotonic_ns()
        if self._lock is None or self._state is None or self._lock.thread != thread:
            self._close_lock()
            self._lock, self._state = LockWatch(thread), ThreadState(number_of(thread))
        node, phase = self._tree.add(frames)
        if self._journal.pause not in (None, "checkpoint"):
            phase = PHASE["evaluation"]
        doing = self._state.doing()
        if node < 0 or not stopping.locked():
            return
        if holder is not None and frames[0][0].file == "torch" and phase in _NEEDS_LOCK:
            held_by, _ = self._tree.add(frames_of(holder, self._tree))
            locked_s = self._lock.taken_ns(int(1e9 * weight_s)) / 1e9
            locked_out = number, place, phase, _LOCKED_OUT, is_behind, held_by
            self._waiting.append((began_ns, locked_out, int(1e6 * locked_s)))
            weight_s -= locked_s
        key = (number, place, phase, doing, is_behind, node)
        if not is_again:
            self._share_out()
            self._look_s, self._looked_at_ns = weight_s, 0 if step is None else step.host_start_ns
            weight_s = min(weight_s, (began_ns - self._looked_at_ns) / 1e9)
        self._looks.append((began_ns, key, max(weight_s, 1e-6)))

    def _share_out(self) -> None:
        """Add the last sample, with those that were taken again in its step: together the time since the one
        before it, each as long as it was in the step."""
        whole_s = sum(part_s for _, _, part_s in self._looks)
        for at_ns, key, part_s in self._looks:
            self._waiting.append((at_ns, key, int(1e6 * self._look_s * part_s / whole_s)))
        self._looks.clear()
        self._add()

    def _add(self, all_of_them: bool = False) -> None:
        """Add up the samples of which it is known whether they were of an evaluation."""
        since_ns = self._journal.may_evaluate_ns  # read before the evaluations, which are written before
        evaluations = tuple(self._journal.evaluations)
        all_of_them = all_of_them or len(self._waiting) > MOST_WAITING
        samples, self._waiting = self._waiting, []
        for at_ns, key, us in samples:
            if 0 < since_ns <= at_ns and not all_of_them:
                self._waiting.append((at_ns, key, us))
                continue
            if any(start_ns <= at_ns <= end_ns for start_ns, end_ns in evaluations):
                key = (*key[:2], PHASE["evaluation"], *key[3:])
            self._sums[key] = self._sums.get(key, 0) + us

    def _close_lock(self) -> None:
        for watch in (self._lock, self._state):
            if watch is not None:
                watch.close()
        self._lock = self._state = None

    def _flush(self, path: Path) -> None:
        """Append a line with what came since the last one."""
        sums, self._sums = self._sums, {}
        frames, nodes = self._tree.taken()
        if not sums or self._num_bytes > MOST_BYTES:
            return
        chunk = StackChunk(
            begins=not self._num_lines,
            attempt=self._attempt,
            run_id=self._run_id,
            frames=frames,
            nodes=nodes,
            samples=[StackSample(*key, us) for key, us in sums.items()],
            cpu_s=round(self._cpu_s, 6),
            elapsed_s=round(self._elapsed_s, 6),
        )
        line = sealed(encoded(chunk), self._num_lines)
        descriptor = regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        with open(descriptor, "ab", buffering=0) as file:
            file.write(line)
        self._num_lines += 1
        self._num_bytes += len(line)


def _allowed(elapsed_s: float) -> tuple[float, float]:
    """CPU time of sampling in so long, and the part of a core by which that grows."""
    early_s, later_s = BURST_CPU_S + EARLY_SHARE * elapsed_s, EARLY_CPU_S + CPU_SHARE / 2 * elapsed_s
    if CPU_SHARE * elapsed_s > later_s:
        return CPU_SHARE * elapsed_s, CPU_SHARE
    return (early_s, EARLY_SHARE) if early_s < later_s else (later_s, CPU_SHARE / 2)


def _where(step: RecordedStep | None) -> tuple[int, int, bool]:
    """Place, global step, and whether a backward pass of it has ended."""
    if step is None:
        return _NO_STEP, NO_STEP, False
    is_behind = any(note.kind == "backward" for note in tuple(step.host_notes))
    return _BODY if step.body_end is None else _BEHIND_BODY, step.global_step, is_behind

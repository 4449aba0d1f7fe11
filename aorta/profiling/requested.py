"""A trace of the next steps of a running job, when `aorta capture` asks for one."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from torch.profiler import profile

from aorta.config import ProfilingConfig
from aorta.profiling.export import export_trace
from aorta.profiling.window import _activities
from aorta.records.requests import CapturePlan, plan_capture, read_plan, read_request, trace_name

log = logging.getLogger(__name__)

POLL_S = 0.5
LEAD_S = 3 * POLL_S
"""Time that the other ranks get to see the plan before its first step."""
LEAD_STEPS = 2


class RequestedCapture:
    """Watches for requests on a thread of its own; the program's thread calls step_begins and close.

    Rank 0 answers a request with a plan that names its first step, far enough ahead for all ranks to read it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._step = 0
        self._began_s = time.monotonic()
        self._num_begun = 0
        self._plan: CapturePlan | None = None
        self._answered = {plan.id} if (plan := read_plan(folder)) is not None else set()
        self._profiler: Any = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="aorta-capture", daemon=True)
        self._thread.start()

    def step_begins(self, global_step: int) -> None:
        """The program's thread, before the first work of a step. Starts or ends the trace where it is due."""
        self._step = global_step
        self._num_begun += 1
        plan = self._plan
        if plan is None:
            return
        if self._profiler is not None:
            if global_step >= plan.first_step + plan.num_steps:
                self._end(plan)
        elif global_step >= plan.first_step:
            self._begin(plan)

    def close(self) -> None:
        """Write what was being traced."""
        self._closing.set()
        if self._profiler is not None and self._plan is not None:
            self._end(self._plan)

    def _begin(self, plan: CapturePlan) -> None:
        if self._step > plan.first_step:
            log.warning("rank %d: the plan for a capture came late, at step %d", self._rank, self._step)
        try:
            self._profiler = profile(activities=_activities())
            self._profiler.start()
        except RuntimeError as error:  # another profiler is on
            log.warning("rank %d: aorta capture: %s", self._rank, error)
            self._profiler = self._plan = None

    def _end(self, plan: CapturePlan) -> None:
        profiler, self._profiler, self._plan = self._profiler, None, None
        path = self._folder / trace_name(plan.id, self._rank)
        try:
            profiler.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            export_trace(profiler.export_chrome_trace, temporary, ProfilingConfig())
            temporary.rename(path)
        except (OSError, RuntimeError) as error:
            log.warning("rank %d: the trace of aorta capture is lost: %s", self._rank, error)

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                if self._rank == 0:
                    self._answer()
                plan = read_plan(self._folder)
            except OSError as error:
                log.warning("rank %d: aorta capture: %s", self._rank, error)
                continue
            if plan is not None and plan.id not in self._answered:
                self._answered.add(plan.id)
                self._plan = plan

    def _answer(self) -> None:
        request = read_request(self._folder)
        if request is None or request.id in self._answered or self._plan is not None:
            return
        plan = read_plan(self._folder)
        if plan is not None and plan.id == request.id:
            return
        step_s = (time.monotonic() - self._began_s) / max(1, self._num_begun)
        lead = max(LEAD_STEPS, int(LEAD_S / max(step_s, 1e-4)) + 1)
        plan_capture(
            self._folder,
            CapturePlan(id=request.id, first_step=self._step + lead, num_steps=request.num_steps),
        )

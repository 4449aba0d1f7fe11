"""What tells that a run communicates, and what may be communication though nothing proves it."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aorta.account.load.rank.kernels import MOST_LETTERS, NAME_TIME, TIME, kernel_name
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Run
from aorta.account.numbers import quantity
from aorta.records.schema import KERNEL_CLASSES
from aorta.timeline.types import OWN_SOURCES, Kind
from aorta.traces.classify import COMM_RULES, COPY_NAMES, classifier, may_be_comm

if TYPE_CHECKING:
    from aorta.traces.model import RankTrace

LARGE_SHARE = 0.05
"""Share of kernel time from which on kernels that may be communication are named."""
MOST_NAMES = 3


class CommEvidence(NamedTuple):
    """Whether a run communicates, as far as its records or traces tell."""

    num_ranks: int
    """Ranks of the job, or of the largest group that is known; 1: one process, which has none to talk to."""
    is_found: bool
    possible_ms: dict[str, float]
    """ms a step of the kernels that count as compute and may be communication by their names, the longest
    first; empty below LARGE_SHARE of kernel time."""
    has_rules: bool
    """Names were read from a trace, so that --comm-rules can say more."""

    @property
    def absence(self) -> str:
        """What can be said where no communication was found; '' where some was."""
        if self.is_found:
            return ""
        if self.num_ranks < 2 and not self.possible_ms:
            return "no communication: one process"
        between = f" between {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        names = f"; by name these may be: {self._names}" if self.possible_ms else ""
        return f"no communication was recognised{between}{names}"

    @property
    def doubt(self) -> str:
        """absence, where there is somebody to talk to; '' of one process."""
        return self.absence if self.num_ranks > 1 or self.possible_ms else ""

    @property
    def note(self) -> str:
        """A line on what nobody can be sure of; '' where there is nothing."""
        if not self.possible_ms and (self.is_found or self.num_ranks < 2):
            return ""
        text = (
            self.absence or f"these kernels count as compute, and by name may be communication: {self._names}"
        )
        return text + ("; --comm-rules FILE names kernels that communicate" if self.has_rules else "")

    @property
    def _names(self) -> str:
        listed = list(self.possible_ms.items())
        rows = [f"{name} ({quantity(ms, 'ms')} a step)" for name, ms in listed[:MOST_NAMES]]
        if len(listed) > MOST_NAMES:
            rows.append(f"{len(listed) - MOST_NAMES} more")
        return ", ".join(rows)


def comm_evidence(run: Run) -> CommEvidence:
    comm = run.metrics.get("comm_ms")
    return CommEvidence(
        num_ranks=max(run.noted.world_size, len(run.ranks)),
        is_found=bool(run.num_collectives.any() or (comm is not None and np.nansum(comm) > 0)),
        possible_ms=run.possible_comm_ms,
        has_rules=run.source not in OWN_SOURCES,
    )


def possible_comm_ms(trace: "RankTrace") -> dict[str, float]:
    """CommEvidence.possible_ms of one rank's trace: of the work that its steps launched, or of all of it
    where it marks none. Empty where the trace says that it is of one process."""
    if trace.world_size == 1:
        return {}
    line, is_counted = trace.timeline, (trace.launch_step >= 0) | (not trace.steps)
    is_comm = line.kind == Kind.COMM
    ms = np.where(is_counted, line.end_ms - line.start_ms, 0.0)
    by_name = np.bincount(line.name, np.where(is_comm, 0.0, ms), len(line.names)).tolist()
    return _large(
        dict(zip(line.names, by_name, strict=True)),
        float(ms[line.kind != Kind.COPY].sum()),
        max(1, len(trace.steps)),
    )


def possible_of_records(run: Run, full_names: Callable[[], Iterable[str]]) -> dict[str, float]:
    """CommEvidence.possible_ms of records, by the kernels that took most time. full_names: of all kernels;
    asked for only where a short name leaves it open."""
    comm_op = classifier(COMM_RULES).comm_op
    short = [
        name for name in operations(run.metrics, NAME_TIME) if comm_op(name) is None and may_be_comm(name)
    ]
    if not short or (run.record is not None and run.record.world_size == 1):
        return {}
    known = {kernel_name(name, 2 * MOST_LETTERS) for name in full_names() if comm_op(name) is not None}
    of_class = [run.metrics.get(of_operation(TIME, name)) for name in KERNEL_CLASSES]
    return _large(
        {
            name: float(np.nansum(run.metrics[of_operation(NAME_TIME, name)]))
            for name in short
            if name not in known
        },
        sum(float(np.nansum(ms)) for ms in of_class if ms is not None),
        len(run.ranks) * run.num_steps,
    )


def _large(ms_of_name: dict[str, float], all_ms: float, num_steps: int) -> dict[str, float]:
    """Of these kernels those that may be communication, where they take a large share, in ms a step."""
    possible: dict[str, float] = {}
    for name, ms in ms_of_name.items():
        if ms > 0 and may_be_comm(name):
            short = name.split(" (")[0] if COPY_NAMES.search(name) else kernel_name(name)
            possible[short] = possible.get(short, 0.0) + ms
    if sum(possible.values()) < LARGE_SHARE * all_ms:
        return {}
    return {name: ms / num_steps for name, ms in sorted(possible.items(), key=lambda row: -row[1])}

"""Why ranks wait for each other: for whom, and what that rank did meanwhile.

A rank that comes last to a collective costs the others their wait. What it spends more time on than the
others do, in the same step, is the reason, the most specific first; each ms of waiting has one.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from aorta.account.cause import CauseKind
from aorta.account.judge.cells import CELLS, EXPOSED_CELLS, Exposed, Host, has_point_to_point
from aorta.account.judge.judged import looked_at
from aorta.account.judge.late import (
    FEWEST_STEPS,
    MARKS,
    ONE_RANK,
    Lateness,
    is_late_in_most,
    lasts,
    late_in_left_out,
    late_of_recorded,
    marks,
    steps_left_out,
)
from aorta.account.judge.phases import TITLES, phases_of_ranks
from aorta.account.load.measures import num_local_ranks
from aorta.account.load.rank.host import AFTER, CPU, READY, UNTIL_UPDATE
from aorta.account.load.rank.host import PREFIX as HOST
from aorta.account.load.rank.kernels import COUNT, TIME
from aorta.account.load.rank.phases import PREFIX as PHASE
from aorta.account.metrics import WORK, of_operation, operations
from aorta.account.model import Run
from aorta.account.numbers import quantity
from aorta.account.rows import of_the_others, positive
from aorta.records.schema import UNLIKE
from aorta.timeline.arrays import Flags, Floats
from aorta.why.causes.code_lines import line_of
from aorta.why.causes.finding import ANY_CELL, WAIT, CauseFinding, of_one_rank, steps_with
from aorta.why.causes.losses.parts import Parts, delayed, longest_of
from aorta.why.causes.losses.program_code import dealt, own_of_rank

IN_TURN = "different ranks in turn"
ASLEEP = "host asleep within the step"
ASLEEP_ON = "on a lock, a pipe, a file, other threads"
LOCKED_OUT = "another thread that holds the interpreter's lock"
WORDS: dict[str, str] = {
    "optimizer": "host-bound optimizer",
    "between_steps": "time between steps",
    "pause": "evaluation, or an announced pause",
}
NEARLY_ALL = 0.8
"""Of the steps."""
UNLIKE_CORES = 0.25
"""By which one core may be slower at the same work than another, where programs share its caches and its
other thread: up to 0.18 was seen, for whole runs."""
UNLIKE_CPU = 0.35
"""The same of CPU time: up to 0.32 was seen, of equal work on two quiet cores."""
QUEUED = 512
"""Launches that a host is ahead, from which on the driver may hold it back: half of the 1,024 that its queue
holds, since events and copies are in it, too."""
WAITS = 0.05
"""Of a step, by which a rank must wait for a batch longer than in recorded ones, to wait in it."""
STEADY = 0.7
"""Of the largest leads of such a host, all but the tenths at both ends, that the smallest one is."""
AS_LONG, LEAST_OF_KERNELS = 1.1, 0.02
"""Time of a class of kernels over that of other ranks, up to which they are as fast there; of those ranks'
kernels, that a class must have to tell."""
SHARED = 3.0
"""Of what equal work saves on a CPU by the times of its ranks, over what may be left of it: while the others
wait, a rank has memory's bandwidth and the caches alone, and where threads of one core are shown as cores,
the other thread of each: two of these at work take up to five thirds of the time. Of three programs 0.3, 0.8
and 0.9 of it were left."""
UNEQUAL = 1.1
"""Bytes of a rank's all_to_all over the mean of the ranks; passes of a late rank over those of the others."""
PART_KINDS: tuple[tuple[str, CauseKind], ...] = (
    ("garbage_collection", "garbage_collection"),
    ("checkpoint", "checkpoint"),
    ("data", "data_loading"),
    ("pause", "pause"),
    ("optimizer", "optimizer"),
    ("between_steps", "between_steps"),
    ("copy", "copy"),
    ("synchronisation", "synchronisation"),
    ("small_messages", "small_messages"),
    ("launch", "launch_bound"),
    ("locked_out", "pause"),
    ("core_taken", "core_taken"),
    ("asleep", "pause"),
    ("idle", "idle"),
)
"""Parts of a rank's step, and the kind of cause that each is."""
OF_ITS_RANK = frozenset(("asleep", "core_taken", "idle", "launch"))
"""Parts that tell of one rank no more than that it is late."""
CELLS_OF_PART: dict[str, tuple[str, ...]] = {
    # Work between two steps, such as an evaluation, keeps the device busy.
    "between_steps": ("between_steps", "idle", "launch", "compute"),
    "checkpoint": ("checkpoint", "copy"),
    "small_messages": ("launch", "compute"),
    "launch": ("launch", "wait"),
    "asleep": ("blocked",),
    "locked_out": ("blocked", "core_taken", "compute", "launch"),
    "core_taken": ("core_taken", "blocked"),
}
"""Where they are not the one of the part's own name."""
MOST_OF_ALL = 0.5
"""Of its lateness, from which on a part of its step is named for it."""
SLEEP_ALIKE = 0.7
"""Of what a late rank's host sleeps, from which on the others' sleep is of the same reason."""
ALSO_OTHERS = 0.25
"""Of what one rank's device idles for a reason, from which on the others have that reason too."""


def unbalanced_stages(judged: Run, parts: Parts, exposed: Exposed) -> Iterator[CauseFinding]:
    """The stage of a pipeline that computes longest, beyond the mean of the stages: what equal stages would
    take less, as far as the others are exposed meanwhile."""
    if exposed.is_split or len(judged.ranks) < 2 or not has_point_to_point(judged):
        return
    ranks, compute = judged.ranks, parts.compute_ms
    worst = int(np.argmax(compute.mean(axis=1)))
    balanced = compute.mean(axis=0)
    others = [row for row in range(len(ranks)) if row != worst]
    loss = np.minimum(positive(compute[worst] - balanced), exposed.unsplit_ms[others].max(axis=0))
    if not loss.any():
        return
    compute_ms, others_ms = float(compute[worst].mean()), float(compute[others].mean())
    yield CauseFinding(
        "late_rank",
        loss,
        takes={WAIT: 1.0},
        facts={
            "who": f"rank {ranks[worst]}",
            "op": "stage",
            "compute_ms": compute_ms,
            "others_compute_ms": others_ms,
            "more_ms": compute_ms - others_ms,
            "balanced_ms": float(balanced.mean()),
            "what": "compute kernels take" if parts.on_device else "code between collectives takes",
        },
        rank=ranks[worst],
    )


def waiting(judged: Run, parts: Parts, exposed: Exposed) -> Iterator[CauseFinding]:
    if not exposed.is_split or len(judged.ranks) < 2:
        return
    left = exposed.lost_to_ms
    ranks = judged.ranks
    if parts.data_waits_ms.any():  # of these the rank that loads longest is no reason
        longest = longest_of(parts.account.cells["data"])
        left[longest] = positive(left[longest] - of_the_others(parts.data_waits_ms)[longest])
    own = own_of_rank(judged, parts.account)
    if own is not None and own.rank is not None and not _is_in_some_steps(judged, parts, left, own.rank):
        lost_ms = left[ranks.index(own.rank)]
        lost_ms *= max(1 - own.mean_ms / max(float(lost_ms.mean()), own.mean_ms), 0.0)
        yield _as_dealt(judged, own)
    yield from _starved_rank(judged, parts, left)
    for name, kind in PART_KINDS:
        by_rank = parts.ms_by_kind.get(name)
        if by_rank is None or name in OF_ITS_RANK:
            continue
        cells = CELLS_OF_PART.get(name, (name,))
        facts = locked_out_facts(float(by_rank.max())) if name == "locked_out" else {}
        yield from _explained(kind, by_rank, left, parts.step_ms, ranks, cells, facts)
    yield from _explained("clock", parts.clock_loss_ms, left, parts.step_ms, ranks, ("compute", "hidden"))
    work = _more_work(judged)
    if work is not None:
        is_busy, facts = work
        cells = ("compute", "hidden")
        yield from _explained(
            "imbalance", parts.compute_ms, left, parts.step_ms, ranks, cells, facts, is_busy
        )
    yield from _late_rank(judged, parts, left)


def _explained(
    kind: CauseKind,
    by_rank_ms: Floats,
    left: Floats,
    step_ms: Floats,
    ranks: list[int],
    cells: tuple[str, ...],
    facts: dict[str, object] | None = None,
    allowed: Flags | None = None,
) -> Iterator[CauseFinding]:
    """Takes from `left` what a part explains. allowed: ranks and steps of which it may."""
    excess = positive(by_rank_ms - of_the_others(by_rank_ms))
    if allowed is not None:
        excess = np.where(allowed, excess, 0.0)
    explained = np.minimum(excess, left)
    left -= explained
    # What comes behind the last collective of a step delays the others in the next one.
    later = np.minimum(delayed(excess - explained), left)
    left -= later
    explained = explained + later
    by_rank = explained.sum(axis=1)
    total = float(by_rank.sum())
    if total <= 0:
        return
    worst = int(np.argmax(by_rank))
    net = explained[worst] - of_the_others(explained)[worst]
    is_one = by_rank[worst] >= ONE_RANK * total and is_late_in_most(net[net != 0], knows_busy=True)
    steps = steps_with(by_rank_ms[worst])
    usual_ms = float(explained.sum(axis=0).mean())
    part_ms = float(by_rank_ms[worst, steps].mean())
    others_ms = float(of_the_others(by_rank_ms)[worst, steps].mean())
    beside = f"{quantity(part_ms, 'ms')} there, {quantity(others_ms, 'ms')} on the others, which wait for it"
    yield CauseFinding(
        kind,
        explained.sum(axis=0),
        takes=of_one_rank(len(ranks), *cells),
        evidence=[beside] if is_one else [],
        facts={
            "who": f"rank {ranks[worst]}" if is_one else IN_TURN,
            "part_ms": part_ms,
            "others_ms": others_ms,
            "step_ms": float(step_ms[:, steps].mean()),
            "in_steps": int((by_rank_ms[worst] > 0 if is_one else explained.sum(axis=0) > 0).sum()),
            "num_steps": explained.shape[1],
            "waits": is_one,
            **({"what": WORDS[kind]} if kind in WORDS else {}),
            **(facts or {}),
        },
        rank=ranks[worst] if is_one else None,
        # On a busy machine another rank comes last in some steps, and the loss is in fewer than its reason.
        is_sure=is_one and bool((excess[worst] >= usual_ms / 2).mean() >= NEARLY_ALL),
    )


def locked_out_facts(ms: float) -> dict[str, object]:
    """What its texts need. ms: of a step on the rank with most of it."""
    return {"op": "locked_out", "what": LOCKED_OUT, "locked_ms": ms, "part_ms": None}


def _more_work(judged: Run) -> tuple[Flags, dict[str, object]] | None:
    """Ranks and steps that an all_to_all gave more than the others."""
    sizes = judged.metrics.get("bytes.all_to_all")
    if sizes is None:
        return None
    sizes = sizes[:, judged.judged_steps]
    mean = positive(sizes).mean(axis=0)
    ratio = np.divide(positive(sizes), mean, out=np.ones_like(sizes), where=mean > 0)
    is_busy = ratio > UNEQUAL
    if not is_busy.any():
        return None
    worst = int(np.argmax(np.median(ratio, axis=1)))
    return is_busy, {
        "ratio": float(np.median(ratio[worst])),
        "bytes": float(np.median(sizes[worst])),
        "mean_bytes": float(np.median(mean)),
    }


def _late_rank(judged: Run, parts: Parts, left: Floats) -> Iterator[CauseFinding]:
    late = _late(judged, parts, left)
    if late is None:
        return  # nobody in particular: ranks vary, and no record tells why
    worst, ranks, arrivals = late.row, judged.ranks, judged.arrivals
    facts: dict[str, object] = {}
    if arrivals is not None and arrivals.num_judged[worst, judged.judged_steps].any():
        facts["num_last"] = int(arrivals.num_last[worst, judged.judged_steps].sum())
        facts["num_judged"] = int(arrivals.num_judged[worst, judged.judged_steps].sum())
    on_core = _on_core(parts, late)
    evidence = [] if on_core is None else [on_core.text(late.when, "it has more work, or a slower core")]
    own = "blocked"
    if on_core is None:
        work, others_work = _of_rank(parts.compute_ms, late)
        asleep = _asleep(parts, late)
        if asleep is not None and _sleep_alike(parts, late):
            yield _all_asleep(parts, late)
            return
        if asleep is not None:
            facts["op"], evidence = "sleeps", [asleep]
        elif (more := _has_more_of(parts, late)) is not None:
            own, there, others = more
            facts["origin"] = "launch" if own == "launch" else None
            evidence = [f"{there}, {others}"]
            # Events around what a device computes have in them what it idles for its host meanwhile.
            is_of_events = (
                judged.source == "events" and parts.ms_by_kind["launch"][late.row].mean() >= late.ms.mean()
            )
            if own == "compute" and parts.on_device and not is_of_events:
                yield _of_more_work(judged, parts, late, facts, evidence[0])
                return
            if (own == "launch" or is_of_events) and late.occasions is None and late.ms.mean() > 0:
                facts["waited_ms"] = float(late.ms.mean())
                late, words, longer_ms = _by_its_host(judged, parts, late)
                facts |= {"op": "launches", "is_most": longer_ms is None, "longer_ms": longer_ms}
                evidence = [f"{there}; {words}"]
        elif parts.on_device:
            facts["op"] = "unknown"
    else:
        work, others_work = on_core.cpu_ms, on_core.others_cpu_ms
        facts["op"] = "sleeps" if on_core.sleeps else "works"
    # A slower core is slower in every step, and more so the more others run there.
    may_be_core = not parts.on_device and late.occasions is None and facts.get("op") != "sleeps"
    unlike = UNLIKE_CORES if on_core is None else UNLIKE_CPU
    if may_be_core and work < (1 + unlike + parts.account.share("core_taken")) * others_work:
        return
    if on_core is not None and not on_core.sleeps:
        longer = _longer_passes(judged, late)
        if longer is not None:
            yield _of_shared_work(judged, parts, late, facts, [on_core.text(late.when, longer)])
            return
        own = _cell_of_work(parts, late)
        facts["least_part"] = 1 - 1 / len(ranks)  # the others may have to do their part of it
    found = _finding_of(late, ranks[worst], of_one_rank(len(ranks), own, *ANY_CELL), facts, evidence)
    yield _as_dealt(judged, found)


def _cell_of_work(parts: Parts, late: Lateness) -> str:
    """Where a late rank that works has more than the others: within its steps, or between them."""
    cells = parts.account.cells
    of_rank = {name: _of_rank(cells[name], late) for name in ("compute", "between_steps") if name in cells}
    more = {name: mine - others for name, (mine, others) in of_rank.items()}
    return max(more, key=lambda name: more[name], default="compute")


def _as_dealt(judged: Run, found: CauseFinding) -> CauseFinding:
    """Of a rank that loads what it hands out to the others: each of them has to load its part then."""
    line = line_of(found, judged)
    if line is not None and (facts := dealt(judged, (line.text, line.caller))):
        found.facts |= facts
        found.takes = {WAIT: 1.0}
        found.shorten(1 - 1 / len(judged.ranks))
    return found


def _of_more_work(
    judged: Run, parts: Parts, late: Lateness, facts: dict[str, object], evidence: str
) -> CauseFinding:
    """Of a rank whose device computes longer. With kernels that show that it has more work: what equal work
    on all ranks saves, its excess over their mean. Without: all of its excess, which mending a slower device
    saves, and no less than equal work would."""
    num, uneven = len(judged.ranks), _uneven_work(judged, late)
    if uneven is not None:
        return _of_shared_work(judged, parts, late, facts, [uneven])
    facts["least_part"] = 1 - 1 / num
    takes = of_one_rank(num, "compute", *ANY_CELL)
    return _finding_of(late, judged.ranks[late.row], takes, facts, [evidence])


def _of_shared_work(
    judged: Run, parts: Parts, late: Lateness, facts: dict[str, object], evidence: list[str]
) -> CauseFinding:
    """Of a rank with more work: it does not vanish, and what equal work saves is its excess over the mean."""
    num = len(judged.ranks)
    found = _finding_of(late, judged.ranks[late.row], {WAIT: 1.0}, facts, evidence)
    found.shorten(1 - 1 / num)
    mine, others = _of_rank(parts.compute_ms, late)
    found.kind = "imbalance"
    _share_machine(found, judged)
    found.facts |= {"op": "batches" if _differ(judged) else "kernels", "mine_ms": mine, "others_ms": others}
    found.facts["at"] = judged.noted.work and judged.noted.work.model_at
    found.facts["equal_ms"] = others + (mine - others) / num
    return found


def _share_machine(found: CauseFinding, judged: Run) -> None:
    """Of equal work on a CPU: of ranks of one machine, told is the middle of what is left and all of it."""
    if judged.source == "host" and num_local_ranks(judged.noted) > 1:
        found.facts["unshared_ms"], found.facts["rest_ms"] = found.mean_ms, 0.0
        found.shorten(SHARED**-0.5)
        found.size_error = math.log(SHARED) / 2


def _longer_passes(judged: Run, late: Lateness) -> str | None:
    """By how much the passes of a late rank are longer where its optimizer is not: on a slower core both are.
    None where both are, or nothing tells."""
    names = (f"{PHASE}forward", f"{HOST}backward", f"{PHASE}optimizer")
    if not set(names) <= judged.host_parts.keys():
        return None
    columns = (positive(judged.host_parts[name][:, judged.judged_steps]) for name in names)
    of_both = [_of_rank(column, late) for column in columns]
    forward, backward, update = (mine / others if others > 0 else 0.0 for mine, others in of_both)
    passes = min(forward, backward)
    # As long as the others' rather than longer by as much as the passes are.
    if passes <= UNEQUAL or not 0 < update < math.sqrt(passes):
        return None
    return (
        f"forward and backward take {forward:.2g} and {backward:.2g} times as long there, and the optimizer,"
        f" which has as much to do on all, {update:.2g} times: it has more work, and no slower core"
    )


def _uneven_work(judged: Run, late: Lateness) -> str | None:
    """Which kernels take longer on a late rank, and which take as long: a slower device has all longer. None
    where all are, or nothing tells."""
    names = [name for name in operations(judged.metrics, TIME) if name != "communication"]
    own = {name: _of_rank(judged.values(of_operation(TIME, name)), late) for name in names}
    least_ms = LEAST_OF_KERNELS * sum(others for _, others in own.values())
    alike = [name for name, (mine, others) in own.items() if least_ms < others and mine < AS_LONG * others]
    longest = max(own, key=lambda name: own[name][0] - own[name][1], default="")
    if not alike:
        return None
    num, others_num = _of_rank(judged.values(of_operation(COUNT, longest)), late)
    mine, others = own[longest]
    same = max(alike, key=lambda name: own[name][1])
    return (
        f"{num:,.0f} kernels ({longest}) take {quantity(mine, 'ms')} there, {others_num:,.0f} on the others"
        f" {quantity(others, 'ms')}; those of {same} take as long on all: it has"
        " more work, and no slower device"
    )


def _finding_of(
    late: Lateness,
    rank: int,
    takes: dict[tuple[str, ...], float],
    facts: dict[str, object],
    evidence: list[str],
) -> CauseFinding:
    return CauseFinding(
        "late_rank",
        late.ms,
        takes=takes,
        facts={"who": f"rank {rank}", "when": late.when, **facts},
        evidence=evidence,
        rank=rank,
        occasions=late.occasions,
        is_sure=late.is_sure,
    )


def _late(judged: Run, parts: Parts, lost_ms: Floats) -> Lateness | None:
    knows_busy = parts.on_device or parts.taken_ms is not None
    return late_of_recorded(lost_ms, judged.global_step[judged.judged_steps], knows_busy)


def _is_in_some_steps(judged: Run, parts: Parts, lost_ms: Floats, rank: int) -> bool:
    """Of a rank that is late with a period, or in left-out steps alone, waits and marks say more than
    samples."""
    late, of_left_out = _late(judged, parts, lost_ms), late_in_left_out(judged.whole)
    has_period = late is not None and late.occasions is not None and judged.ranks[late.row] == rank
    return has_period or (of_left_out is not None and judged.ranks[of_left_out.row] == rank)


def _of_rank(values: Floats, late: Lateness) -> tuple[float, float]:
    """Means of the rank and of the others, in the steps where it is late."""
    return tuple(float(row[late.row, late.steps].mean()) for row in (values, of_the_others(values)))  # type: ignore[return-value]


class _OnCore(NamedTuple):
    """What a rank's thread and those of the others do outside of collectives, in ms a step."""

    cpu_ms: float
    others_cpu_ms: float
    asleep_ms: float
    others_asleep_ms: float

    @property
    def more_ms(self) -> float:
        return max(self.cpu_ms - self.others_cpu_ms, self.asleep_ms - self.others_asleep_ms)

    @property
    def sleeps(self) -> bool:
        return self.asleep_ms - self.others_asleep_ms > self.cpu_ms - self.others_cpu_ms

    def text(self, when: str, why: str) -> str:
        cpu, others_cpu, asleep, others = (quantity(ms, "ms") for ms in self)
        if self.sleeps:
            return (
                f"outside of collectives its thread sleeps {asleep} {when}, the others' {others}: {ASLEEP_ON}"
            )
        return f"its thread uses {cpu} of CPU {when}, the others' {others_cpu}: {why}"


def _on_core(parts: Parts, late: Lateness) -> _OnCore | None:
    """None where nothing tells."""
    if parts.cpu_ms is None or parts.taken_ms is None or parts.on_device:
        return None
    exposed = sum(parts.account.cells.get(name, 0.0) for name in EXPOSED_CELLS)
    asleep = positive(parts.step_ms - exposed - parts.cpu_ms - parts.taken_ms)
    parts_ms = (parts.cpu_ms, of_the_others(parts.cpu_ms), asleep, of_the_others(asleep))
    by_step = np.stack([part[late.row] for part in parts_ms])
    # What comes behind the last collective of a step delays the others in the next one.
    moved = (0,) if late.occasions is None else (0, 1)
    of_steps = (np.roll(by_step, num, axis=1)[:, late.steps].mean(axis=1).tolist() for num in moved)
    return max((_OnCore(*means) for means in of_steps), key=lambda one: one.more_ms)


def _asleep(parts: Parts, late: Lateness) -> str | None:
    """What its host does while its device idles, where that is most of the lateness."""
    by_rank = parts.ms_by_kind.get("asleep")
    if by_rank is None:
        return None
    asleep_ms, others_ms = _of_rank(by_rank, late)
    if not asleep_ms - others_ms >= ONE_RANK * float(late.ms[late.steps].mean()) > 0:
        return None
    return (
        f"its device idles {quantity(asleep_ms, 'ms')} {late.when} while the host's thread sleeps, the"
        f" others' {quantity(others_ms, 'ms')}: {ASLEEP_ON}"
    )


def _sleep_alike(parts: Parts, late: Lateness) -> bool:
    """Whether the others' hosts sleep as long, their devices being busy or waiting in a part of it: a host
    may sleep because its device waits, but not while that idles."""
    own, others = _of_rank(parts.asleep_ms, late)
    idle, others_idle = _of_rank(parts.ms_by_kind["asleep"], late)
    return others >= SLEEP_ALIKE * own and others_idle >= ALSO_OTHERS * idle


def _all_asleep(parts: Parts, late: Lateness) -> CauseFinding:
    return CauseFinding(
        "pause",
        late.ms,
        takes=of_one_rank(len(parts.step_ms), "blocked"),
        facts={
            "op": "asleep",
            "what": ASLEEP,
            "who": IN_TURN,
            "asleep_ms": float(parts.asleep_ms[:, late.steps].mean()),
        },
        occasions=late.occasions,
        is_sure=late.is_sure,
    )


def _has_more_of(parts: Parts, late: Lateness) -> tuple[str, str, str] | None:
    """The cell of its step in which it takes longest beyond the others, that in words, and the others'."""
    cells = {name: values for name, values in parts.account.cells.items() if name not in EXPOSED_CELLS}
    # Those that wait compute beside a collective that has begun.
    cells["compute"] = cells.get("compute", 0.0) + cells.pop("hidden", np.zeros_like(parts.step_ms))
    if "data" in cells:
        cells["data"] = cells["data"] + parts.data_waits_ms
    own = {name: _of_rank(values, late) for name, values in cells.items()}
    name = max(own, key=lambda name: own[name][0] - own[name][1])
    mine, others = own[name]
    if not mine - others >= MOST_OF_ALL * float(late.ms[late.steps].mean()):
        return None
    there = f"{CELLS[name].title}: {quantity(mine, 'ms')} {late.when} there"
    return name, there, f"{quantity(others, 'ms')} on the others"


def _by_its_host(judged: Run, parts: Parts, late: Lateness) -> tuple[Lateness, str, float | None]:
    """A rank whose device idles for its host, late by as much as that host is slower than the others'; that
    in words, and whether it is known to be no more alone.

    A lead that the others' hosts once had costs their devices a wait in every step, in which nothing of
    theirs idles, and the step nothing: the hosts may be equally slow. The slower one takes longer in some
    phase of most steps, all along the run; a faster one takes longer where it waits. All judged steps tell,
    since recorded ones are few, and behind the first of them, which takes one rank longer.
    """
    whole = judged.whole
    phases = phases_of_ranks(whole, np.ones(whole.num_judged, dtype=bool))
    if not phases:
        return late, "what the others' hosts take is not known", None
    at_ms = marks(whole).get(UNTIL_UPDATE)
    if at_ms is not None and _is_held_back(judged, parts, late.row, at_ms):
        return late, "the others' hosts are ahead by as much as the driver lets them", None
    titles = {name: title for name, title in TITLES.items() if name in phases}
    beyond = {title: (phases[name] - of_the_others(phases[name]))[late.row] for name, title in titles.items()}
    slower = {title: ms for title, ms in beyond.items() if ms.mean() > 0}
    longer_ms = np.sum([np.zeros_like(phases["step"][0]), *slower.values()], axis=0)
    mean_ms = all_ms = float(longer_ms.mean())
    if not is_late_in_most(longer_ms, knows_busy=True):
        longer_ms[:] = mean_ms = 0.0
    most = max(slower, key=lambda title: float(slower[title].mean()), default="none")
    words = (
        f"its host takes {quantity(mean_ms, 'ms')} longer than the others' (most: {most}), in"
        f" {int((longer_ms > 0).sum()):,} of {len(longer_ms):,} steps"
    )
    return replace(late, ms=min(mean_ms / float(late.ms.mean()), 1.0) * late.ms), words, all_ms


def _is_held_back(judged: Run, parts: Parts, row: int, at_ms: Floats) -> bool:
    """Whether the others' hosts may have no more launches in the driver's queue, and wait at each one of them
    in whatever phase the slow one takes long: their lead is as large, and hardly ever another one.

    at_ms: [rank, judged step] at which each came to its update.
    """
    lead = (at_ms[row] - of_the_others(at_ms)[row])[np.isfinite(at_ms).all(axis=0)]
    if not len(lead):
        return False
    least, most = np.percentile(lead, (10, 90))
    kernels = Host(judged, judged.judged_steps).num_kernels
    is_queued = kernels is None or least * kernels[row].mean() >= QUEUED * parts.step_ms.mean()
    return bool(is_queued and 0 < least >= STEADY * most)


def _starved_rank(judged: Run, parts: Parts, left: Floats) -> Iterator[CauseFinding]:
    """Takes from `left` what other programs cost a rank beyond what they cost all: cores that they had, while
    its thread was ready to run. A rank with more work loses more of it to them, which is its work's."""
    if parts.on_device or parts.cpu_ms is None or parts.taken_ms is None or not parts.cpu_ms.any():
        return
    usual_ratio = float(parts.taken_ms.sum() / parts.cpu_ms.sum())
    beyond = parts.taken_ms - usual_ratio * parts.cpu_ms
    explained = np.minimum(positive(beyond - of_the_others(beyond)), left)
    left -= explained
    late = _late(judged, parts, explained)
    if late is None:
        return
    taken_ms, others_ms = _of_rank(parts.taken_ms, late)
    facts: dict[str, object] = {"op": "starved", "taken_ms": taken_ms, "others_taken_ms": others_ms}
    takes = of_one_rank(len(judged.ranks), "core_taken", *ANY_CELL)
    yield _finding_of(late, judged.ranks[late.row], takes, facts, [])


def left_out(judged: Run) -> CauseFinding | None:
    """What each of the judged steps that were left out would be shorter by, were its late rank not late."""
    late = late_in_left_out(judged)
    if late is None:
        return _starved_in_left_out(judged)
    num, mean_ms = len(late.late_ms), float(late.late_ms.mean())
    rank = judged.ranks[late.row]
    return CauseFinding(
        "late_rank",
        late.late_ms * (late.cost_ms / mean_ms),
        takes={WAIT: 1.0},
        facts={"who": f"rank {rank}", "op": late.op},
        evidence=[
            f"in {num:,} judged steps that the overhead left out it comes to"
            f" {MARKS[late.mark]} {quantity(mean_ms + late.usual_ms, 'ms')} behind the others, in recorded"
            f" ones {quantity(late.usual_ms, 'ms')}; steps take {quantity(late.longer_ms, 'ms')} more then"
        ],
        rank=rank,
        steps=steps_left_out(judged),
        is_sure=True,
    )


def loading_left_out(judged: Run, is_told: bool) -> CauseFinding | None:
    """What each of the judged steps that were left out would be shorter by, did the rank that waits most for
    its batches wait no longer than in recorded ones, for which workers may have had a stock; but no more than
    by what these steps are longer than those in which no rank waits. is_told: a cause has what recorded ones
    wait, in the mean, and this is beyond it."""
    names, steps = (f"{HOST}data", f"{HOST}data{AFTER}"), steps_left_out(judged)
    step_ms, looked = judged.values("step_ms").mean(axis=0), looked_at(judged)
    in_account = np.isin(judged.global_step[judged.judged_steps], looked.global_step[looked.judged_steps])
    is_known = ~steps & in_account
    if min(steps.sum(), is_known.sum()) < FEWEST_STEPS or not set(names) <= judged.host_parts.keys():
        return None
    waits_ms = np.sum([positive(judged.host_parts[name][:, judged.judged_steps]) for name in names], axis=0)
    # Few recorded steps of which one waits do not make that usual.
    beyond_ms = positive(waits_ms - np.median(waits_ms[:, is_known], axis=1, keepdims=True))
    row = beyond_ms[:, steps].mean(axis=1).argmax()
    row_ms, told_ms = beyond_ms[row], float(waits_ms[row, is_known].mean()) if is_told else 0.0
    waits = (beyond_ms > WAITS * step_ms.mean()).any(axis=0)
    # A rank whose host runs ahead meets the wait of another one in the step behind it.
    is_free = (is_known | steps) & ~waits & ~np.append(False, waits[:-1])
    mean_ms, usual_ms = row_ms[steps].mean(), np.median(step_ms[is_free if is_free.any() else is_known])
    longer_ms = float(step_ms[steps].mean() - usual_ms)
    cost_ms = min(float(mean_ms), longer_ms, float(waits_ms[row, steps].mean()) - told_ms)
    if not cost_ms > 0 or not lasts(row_ms[steps], knows_busy=True):
        return None
    in_steps, num = int((waits & steps).sum()), judged.num_judged
    all_ms = quantity(cost_ms * float(steps.mean()), "ms")
    return CauseFinding(
        "data_loading",
        row_ms[steps] * (cost_ms / mean_ms),
        takes={("unrecorded",): 1.0},
        facts={"waits": False, "in_left_out": in_steps},
        evidence=[
            f"by the host's marks the loop waits for its next batch in {in_steps:,} of {num:,} judged steps,"
            f" which were not recorded: {all_ms} of the mean step, {quantity(float(step_ms.mean()), 'ms')}"
        ],
        steps=steps,
    )


def _starved_in_left_out(judged: Run) -> CauseFinding | None:
    """As _starved_rank, beyond what other programs take of the others for as much CPU time."""
    parts, steps, ranks = judged.host_parts, steps_left_out(judged), judged.ranks
    if judged.source != "host" or not {CPU, READY} <= parts.keys() or min(steps.sum(), len(ranks)) < 2:
        return None
    cpu, taken = (np.nan_to_num(parts[name][:, judged.judged_steps])[:, steps] for name in (CPU, READY))
    ratio = of_the_others(taken).mean(axis=1) / np.maximum(of_the_others(cpu).mean(axis=1), 1e-9)
    beyond = positive(taken - ratio[:, None] * cpu)
    late = late_of_recorded(beyond, judged.global_step[judged.judged_steps][steps], knows_busy=True)
    if late is None:
        return None
    taken_ms, others_ms = _of_rank(taken, late)
    facts: dict[str, object] = {"op": "starved", "taken_ms": taken_ms, "others_taken_ms": others_ms}
    found = _finding_of(late, ranks[late.row], {WAIT: 1.0}, facts, [])
    found.steps = steps
    return found


# -- batches of unequal length -------------------------------------------------------------------------------


MORE_TOKENS = 1.05
"""Of the ranks' mean, that a rank must get in the mean step where the program tells tokens."""


IN_STEP = 0.5
"""Correlation of the ranks' compute over steps: 0 where each has its own batches, 1 where all have alike."""


def in_step(work_ms: Floats) -> float:
    """The mean correlation of ranks over steps; work_ms: [rank, step]."""
    num, of_one = len(work_ms), float(work_ms.var(axis=1).mean())
    return (num * float(work_ms.mean(axis=0).var()) / of_one - 1) / (num - 1) if of_one > 0 else 0.0


def follows(lost_ms: Floats, work_ms: Floats) -> float:
    """ms at most that ranks may wait for one, for each ms that it computes longer, by the steps in which it
    does; infinite of few steps. Both are [rank, step]."""
    num = work_ms.shape[1]
    more, waited = (values - of_the_others(values) for values in (work_ms, lost_ms))
    more, waited = (values - values.mean(axis=1, keepdims=True) for values in (more, waited))
    if num < FEWEST_STEPS or not more.any():
        return math.inf
    slope = float((more * waited).sum() / (more**2).sum())
    error = math.sqrt(float(((waited - slope * more) ** 2).sum() / (more**2).sum()) / (num - 2))
    return slope + 2 * error


def uneven_batches(run: Run, parts: Parts, exposed: Exposed) -> Iterator[CauseFinding]:
    """What the longest computing rank of each step has beyond the mean of the ranks, which batches of one
    size would save, as far as the others wait for it. A clock that is held down is another cause."""
    cells = parts.account.cells
    if not exposed.is_split or len(run.ranks) < 2 or "bytes.all_to_all" in run.metrics or not _differ(run):
        return
    work = np.sum([cells[name] for name in ("compute", "hidden") if name in cells], axis=0)
    work = work - parts.clock_loss_ms
    if not parts.on_device and in_step(work) > IN_STEP:
        return  # the ranks have long batches together, and what is between them is their cores' noise
    row, steps = work.argmax(axis=0), np.arange(work.shape[1])
    waited = exposed.lost_to_ms[row, steps]
    loss = np.minimum(positive(work.max(axis=0) - work.mean(axis=0)), waited)
    if not loss.any():
        return
    excess_ms = float((work.max(axis=0) - work.mean(axis=0)).mean())
    # Ranks that wait no longer for more work wait for hosts, which equal batches do not mend.
    beyond = max(follows(exposed.lost_to_ms, work), 1.0) if parts.on_device else math.inf
    worst = int(np.bincount(row, loss, len(run.ranks)).argmax())
    is_one = (row == worst).mean() >= NEARLY_ALL  # in fewer, chance deals longer batches to one rank
    found = CauseFinding(
        "imbalance",
        loss,
        takes={WAIT: 1.0},
        facts={
            "op": "batches",
            "who": f"rank {run.ranks[worst]}" if is_one else IN_TURN,
            "longest_ms": float(work.max(axis=0).mean()),
            "mean_ms": float(work.mean()),
            "low_ms": float(work.min()),
            "high_ms": float(work.max()),
            "rest_ms": beyond * excess_ms - float(loss.mean()),
            "at": run.noted.work and run.noted.work.model_at,  # which is handed the batches
        },
        rank=run.ranks[worst] if is_one else None,
        # Chance deals batches: a few recorded steps differ more than an interval of their mean allows for.
        is_sure=parts.on_device and lasts(loss, knows_busy=True),
        # Beside a collective that waits kernels are slower: without it the others would wait longer.
        more_ms=max(float(np.median(waited) - loss.mean()), 0.0),
    )
    _share_machine(found, run)
    yield found


def _differ(judged: Run) -> bool:
    """Rank 0's batches were seen to, or the program says so of the ranks' tokens."""
    tokens = positive(judged.values(WORK)) if WORK in judged.metrics else np.zeros(1)
    if not tokens.any():
        return judged.noted.not_measured.get("tokens") == UNLIKE
    return float(tokens.max(axis=0).mean()) > MORE_TOKENS * float(tokens.mean())

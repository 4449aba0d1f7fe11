"""The ranks that the others wait for, from the reports of all ranks; plain data, in and out.

In each group the ranks number their collectives alike. Where two ranks issued different ones under one
number, one of them left the program's order, and what followed is a consequence. Otherwise the first one
that is not finished blocks the group: ranks that have started it wait there, ranks that have not are waited
for. One of those may itself wait in another group, so the answer is the rank at the end of that chain.
Where ranks wait for each other in a ring, the one is named that issued the collectives of its groups in
another order than in its other steps. Sends and receives are not numbered alike; a rank in one waits for
its peer. For example, > is started and not finished:

    group default     #6           #7
    rank 0            all_reduce   > all_gather
    rank 1            all_reduce   > all_gather
    rank 2            all_reduce                    absent: rank 2 has not come to #7
    or rank 2         all_reduce   > broadcast      mismatch: most issued all_gather, so rank 2 departed

    group             a: 0 and 1   b: 0 and 1
    rank 0            > #4         not issued       waits for rank 1
    rank 1            not issued   > #2             waits for rank 0: cycle
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple

from aorta.hang.order import Signature, comparable, departure, next_keys, signature
from aorta.hang.report import LISTED_BEFORE, CallState, GroupState, HangReport
from aorta.timeline.collective import POINT_TO_POINT

HangKind = Literal["absent", "mismatch", "cycle", "all_inside", "nobody_waits"]
"""absent: ranks have not come to a collective. mismatch: they issued different ones under one number.
cycle: ranks wait for each other in different groups. all_inside: every rank has started the same one.
nobody_waits: no rank has an unfinished collective."""

MOST = 16
"""Ranks in a list of the sentence, and notes of a kind."""
OLD_S = 30.0
"""Age beyond the limit at which a report is called old: ranks without a store report up to a limit apart, and
clocks of machines differ."""


@dataclass(frozen=True)
class StuckCollective:
    """A group whose ranks do not get past a collective."""

    key: str
    name: str
    ranks: tuple[int, ...]
    """Ranks of the group."""
    seq: int
    waiting: dict[int, CallState]
    """Ranks that have started the collective, each with its call."""
    absent: list[int]
    """Ranks of the group that have not started it, those without a report among them."""

    @property
    def call(self) -> CallState:
        return self.waiting[min(self.waiting)]


@dataclass(frozen=True)
class HangFinding:
    """The answer: who is waited for, and where the others wait. sentence() puts it in words."""

    kind: HangKind
    ranks: list[int]
    """Ranks that are waited for, or departed from the usual order; empty where the reports do not tell."""
    stuck: StuckCollective | None
    """The collective that the others wait in."""
    notes: list[str] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    """Ranks that left no report."""
    reports: list[HangReport] = field(default_factory=list)


def find(reports: Sequence[HangReport]) -> HangFinding:
    """The answer from the reports of one run's ranks; some may be missing."""
    by_rank = {report.rank: report for report in reports}
    silent = [
        rank
        for rank in range(reports[0].world_size)
        if rank not in by_rank or by_rank[rank].is_from_last_calls
    ]
    all_stuck = _stuck_collectives(by_rank)
    kind, ranks, stuck, notes = _who_is_waited_for(by_rank, all_stuck, silent)
    counted = [rank for rank in ranks if rank in by_rank and _is_counted(by_rank[rank])]
    if kind == "absent" and counted:
        was, it = ("was", "it") if len(counted) == 1 else ("were", "they")
        notes.append(
            f"if {_ranks(counted)} {was} killed, what {it} had queued before may not have run either"
        )
    return HangFinding(kind, ranks, stuck, [*notes, *_old(reports)], silent, list(reports))


def _is_counted(report: HangReport) -> bool:
    """True for a silent rank of which only the number of collectives is known, not how far its device was."""
    return report.is_from_last_calls and not any(group.calls for group in report.groups or ())


def _old(reports: Sequence[HangReport]) -> list[str]:
    """Note on reports that are much older than the latest: from an earlier hang, or stuck since then."""
    latest = max(reports, key=lambda report: report.written_unix_ns)
    ages_s = {r.rank: (latest.written_unix_ns - r.written_unix_ns) / 1e9 for r in reports}
    old = [rank for rank, age_s in ages_s.items() if age_s > latest.limit_s + OLD_S]
    if not old:
        return []
    return [f"what {_ranks(old)} reported is older by {min(ages_s[rank] for rank in old):.0f} s or more"]


# ---- who is waited for -------------------------------------------------------------------------


Judged = tuple[HangKind, list[int], StuckCollective | None, list[str]]


def _who_is_waited_for(
    by_rank: dict[int, HangReport], all_stuck: list[StuckCollective], silent: list[int]
) -> Judged:
    """Kind of hang, ranks that are waited for, the collective that the others wait in, notes."""
    mismatch = _mismatch(by_rank)
    if mismatch is not None:
        ranks, notes = _departed(by_rank, mismatch)
        return "mismatch", ranks, mismatch, notes
    waits_in = {rank: stuck for stuck in all_stuck for rank in stuck.waiting}
    # The end of a chain of waiting: ranks that have not come to a collective and wait in no other.
    ends = [(stuck, [rank for rank in stuck.absent if rank not in waits_in]) for stuck in all_stuck]
    ends = [(stuck, ranks) for stuck, ranks in ends if ranks]
    if ends:
        _, ranks = max(ends, key=lambda end: len(end[0].waiting))
        # Ranks that wait for the same ones in a later step came past without them: after a broadcast, say.
        candidates = [stuck for stuck, absent in ends if absent == ranks]
        keys = next_keys(by_rank[ranks[0]]) if ranks[0] in by_rank else []
        stuck = min(
            candidates,
            key=lambda stuck: (
                stuck.call.step,
                keys.index(stuck.key) if stuck.key in keys else len(keys),
                *_time_of(stuck),
            ),
        )
        return "absent", ranks, stuck, _skips(by_rank, stuck)
    if any(stuck.absent for stuck in all_stuck):
        # Whoever is absent from one collective waits in another: the chain is a ring.
        return _cycle(by_rank, [stuck for stuck in all_stuck if stuck.absent], waits_in)
    if all_stuck:
        return "all_inside", [], all_stuck[0], []
    return "nobody_waits", _behind(by_rank, silent), None, _not_told(by_rank)


def _not_told(by_rank: dict[int, HangReport]) -> list[str]:
    """Notes on groups whose ranks all issued the same, while no report tells how far their devices are."""
    notes = []
    for (_, ranks), states in _groups(by_rank).items():
        unknown = [call for group in states.values() for call in group.calls if call.finished is None]
        issued = {group.num_seen for group in states.values()}
        if not unknown or len(issued) > 1 or len(states) < len(ranks):
            continue
        first, last = (pick(unknown, key=lambda call: call.seq) for pick in (min, max))
        steps = f"step {first.step}" if first.step == last.step else f"steps {first.step} to {last.step}"
        notes.append(
            f"{_ranks(ranks)} may be in any of #{first.seq} to #{last.seq} of group"
            f" {next(iter(states.values())).name} ({steps}): the device tells of whole steps alone"
        )
    return notes[:MOST]


def _cycle(
    by_rank: dict[int, HangReport], ring: list[StuckCollective], waits_in: dict[int, StuckCollective]
) -> Judged:
    """Ranks that issued the collectives of several groups in another order; if none did, all waited for."""
    step = min(call.step for stuck in ring for call in stuck.waiting.values())
    departures = {rank: departure(by_rank[rank], step) for rank in sorted(waits_in)}
    departed = [rank for rank, departure_text in departures.items() if departure_text is not None]
    waited_for = sorted({rank for stuck in ring for rank in stuck.absent})
    stuck = next((one for one in ring if set(departed) & set(one.absent)), ring[0])
    notes = [departure_text for departure_text in departures.values() if departure_text is not None]
    notes.append("the ranks wait for each other" if notes else "ranks wait for each other")
    notes += [_waits(rank, waits_in) for rank in sorted(waits_in)[:MOST]]
    return "cycle", departed or waited_for, stuck, notes


Groups = dict[tuple[str, tuple[int, ...]], dict[int, GroupState]]


def _groups(by_rank: dict[int, HangReport]) -> Groups:
    """Each rank's state of every group, by the group's key and ranks; groups of one rank are left out."""
    groups: Groups = {}
    for rank, report in by_rank.items():
        for group in report.groups or ():
            if len(group.ranks) > 1:
                groups.setdefault((group.key, tuple(group.ranks)), {})[rank] = group
    return groups


def _is_point_to_point(states: dict[int, GroupState]) -> bool:
    return any(call.op in POINT_TO_POINT for group in states.values() for call in group.calls)


def _mismatch(by_rank: dict[int, HangReport]) -> StuckCollective | None:
    """The first number under which ranks of a group issued different collectives.

    Of several groups: the one where that was in the earliest step, and there the longest ago. The others are
    consequences.
    """
    differing = []
    for (key, ranks), states in _groups(by_rank).items():
        if _is_point_to_point(states):
            continue
        rows: dict[int, dict[int, CallState]] = {}
        for rank, group in states.items():
            for call in group.calls:
                rows.setdefault(call.seq, {})[rank] = call
        seq = _first_difference(rows)
        if seq is not None:
            absent = [rank for rank in ranks if rank not in rows[seq]]
            name = next(iter(states.values())).name
            differing.append(StuckCollective(key, name, ranks, seq, rows[seq], absent))
    return min(differing, key=_time_of, default=None)


def _first_difference(rows: dict[int, dict[int, CallState]]) -> int | None:
    """The first number under which ranks issued different collectives; None if there is none.

    Where the same collectives came in different steps before, the first such number: a rank that leaves out
    a whole step goes on in the usual order. rows: calls by number and rank.
    """
    numbers = sorted(rows)
    different = (seq for seq in numbers if len({comparable(call) for call in rows[seq].values()}) > 1)
    seq = next(different, None)
    if seq is None:
        return None
    return next((n for n in numbers if n < seq and len({call.step for call in rows[n].values()}) > 1), seq)


def _time_of(stuck: StuckCollective) -> tuple[int, float]:
    calls = stuck.waiting.values()
    return min(call.step for call in calls), -max(call.age_s or 0.0 for call in calls)


def _stuck_collectives(by_rank: dict[int, HangReport]) -> list[StuckCollective]:
    found: list[StuckCollective | None] = []
    for (key, ranks), states in _groups(by_rank).items():
        if _is_point_to_point(states):
            found += _stuck_point_to_point(key, ranks, states)
        else:
            found.append(_stuck_in_group(key, ranks, states, by_rank))
    return [stuck for stuck in found if stuck is not None]


def _stuck_point_to_point(
    key: str, ranks: tuple[int, ...], states: dict[int, GroupState]
) -> list[StuckCollective | None]:
    """A stuck collective for each rank whose send or receive is not finished."""
    found: list[StuckCollective | None] = []
    for rank, group in states.items():
        pending = next((c for c in group.calls if c.finished is False and _begun(c)), None)
        if pending is None:
            continue
        if pending.op in POINT_TO_POINT:
            peers = [] if pending.peer is None else [ranks[pending.peer]]
        else:
            peers = _not_come(ranks, states, group, pending)
        found.append(StuckCollective(key, group.name, ranks, pending.seq, {rank: pending}, peers))
    return found


def _not_come(
    ranks: tuple[int, ...], states: dict[int, GroupState], own_group: GroupState, pending: CallState
) -> list[int]:
    """Ranks that have not begun a collective of a group that also has sends and receives.

    Not every rank issues those, so numbers differ between ranks: the place in the step is compared.
    """

    def of_step(group: GroupState) -> list[CallState]:
        return [c for c in group.calls if c.step == pending.step and c.op not in POINT_TO_POINT]

    place = of_step(own_group).index(pending)
    arrived = {rank for rank, group in states.items() if any(map(_begun, of_step(group)[place : place + 1]))}
    return [rank for rank in ranks if rank not in arrived]


def _stuck_in_group(
    key: str, ranks: tuple[int, ...], states: dict[int, GroupState], by_rank: dict[int, HangReport]
) -> StuckCollective | None:
    """The collective that ranks of the group wait in; None where none waits.

    It is the first that some rank has not finished: whoever has started it waits, whoever has not is absent.
    """
    # A rank that knows nothing of the group has issued nothing in it.
    reporting = [rank for rank in ranks if rank in by_rank and by_rank[rank].groups is not None]
    seq = min((_front(states[rank]) if rank in states else 0 for rank in reporting), default=0)
    waiting: dict[int, CallState] = {}
    unknown: dict[int, CallState] = {}
    absent = [rank for rank in ranks if rank not in by_rank]
    for rank in reporting:
        group = states.get(rank)
        call = _call(group, seq)
        not_issued = group is None or (call is None and group.num_seen <= seq)
        not_begun = call is not None and not _begun(call)
        if not_issued or not_begun:
            absent.append(rank)
        elif call is not None and call.finished is False:
            waiting[rank] = call
        elif call is not None and call.finished is None:
            unknown[rank] = call
    if absent:
        # A collective does not end without all its ranks: those that issued it are still in it.
        waiting |= unknown
    if not waiting:
        return None
    name = next(iter(states.values())).name
    return StuckCollective(key, name, ranks, seq, waiting, sorted(absent))


def _begun(call: CallState) -> bool:
    return call.started is not False


def _front(group: GroupState) -> int:
    """Number of the first collective that is not finished."""
    return next((call.seq for call in group.calls if call.finished is False), group.num_seen)


def _call(group: GroupState | None, seq: int) -> CallState | None:
    if group is None:
        return None
    return next((call for call in group.calls if call.seq == seq), None)


# ---- who left the usual order ------------------------------------------------------------------


def _departed(by_rank: dict[int, HangReport], stuck: StuckCollective) -> tuple[list[int], list[str]]:
    """Ranks that issued another collective than most, and notes on how.

    Where there is no majority: ranks whose own other steps have another collective in this place.
    """
    counts = Counter(comparable(call) for call in stuck.waiting.values()).most_common()
    if len(counts) == 1:
        return _in_other_steps(by_rank, stuck, _call_text(stuck))
    if len(counts) < 2 or counts[0][1] > counts[1][1]:
        usual = counts[0][0]
        departed = [rank for rank, call in stuck.waiting.items() if comparable(call) != usual]
        usual_rank = next(rank for rank, call in stuck.waiting.items() if comparable(call) == usual)
        notes = [_divergence_text(by_rank, stuck, rank, usual_rank) for rank in departed[:MOST]]
    else:
        departed, notes = _unlike_other_steps(by_rank, stuck)
        if not departed and len({call.step for call in stuck.waiting.values()}) > 1:
            departed, in_step_notes = _in_other_steps(by_rank, stuck, "it")
            notes = in_step_notes if departed else notes
        if not departed and notes:
            return [], notes
        if not departed:
            undecided = "as many ranks issued the one as the other, and no other step tells which is usual"
            return [], [undecided, *_skips(by_rank, stuck)]
    if stuck.absent:
        notes.append(f"{_ranks(stuck.absent)} {_have(stuck.absent)} not come there")
    return departed, notes


def _in_other_steps(
    by_rank: dict[int, HangReport], stuck: StuckCollective, name: str
) -> tuple[list[int], list[str]]:
    """Ranks that issued the same collective in another step than most, and notes on how.

    Where there is no majority: ranks that issued more or fewer collectives in the earlier of the steps than
    in the steps before. name: the collective in the first note; in the others it is `it`.
    """
    steps = Counter(call.step for call in stuck.waiting.values()).most_common()
    earliest = min(number for number, _ in steps)
    if steps[0][1] > steps[1][1]:
        departed = [rank for rank, call in stuck.waiting.items() if call.step != steps[0][0]]
    else:
        departed = []
        for rank in stuck.waiting:
            group = _group_of(by_rank[rank], stuck.key)
            counts = Counter(call.step for call in group.calls) if group is not None else Counter()
            usual = {num for step, num in counts.items() if min(counts) < step < earliest}
            is_over = max(counts, default=earliest) > earliest
            if usual and is_over and counts[earliest] not in usual:
                departed.append(rank)
        if len(departed) == len(stuck.waiting):
            departed = []
    notes: list[str] = []
    for rank in departed:
        step = stuck.waiting[rank].step
        others = next((c.step for r, c in stuck.waiting.items() if r not in departed), earliest)
        change = "left out collectives before" if step > others else "issued more before"
        collective = "it" if notes else name
        notes.append(f"rank {rank} came to {collective} in step {step}, others in step {others}: it {change}")
    if not departed:
        notes.append(f"the ranks came to {name} in different steps, and nothing tells which left one out")
    return departed, notes


def _divergence_text(
    by_rank: dict[int, HangReport], stuck: StuckCollective, rank: int, usual_rank: int
) -> str:
    """How a rank departed from another: a collective left out, one more, or one in place of another."""
    issued, usual = stuck.waiting[rank], stuck.waiting[usual_rank]
    after_own = _call(_group_of(by_rank[rank], stuck.key), stuck.seq + 1)
    after_usual = _call(_group_of(by_rank[usual_rank], stuck.key), stuck.seq + 1)
    if after_usual is not None and comparable(after_usual) == comparable(issued):
        return f"rank {rank} skipped {signature(usual)}"
    if after_own is not None and comparable(after_own) == comparable(usual):
        return f"rank {rank} issued one more before {signature(usual)}"
    return f"rank {rank} issued {signature(issued)} in place of {signature(usual)}"


def _group_of(report: HangReport, key: str) -> GroupState | None:
    return next((group for group in report.groups or () if group.key == key), None)


def _unlike_other_steps(
    by_rank: dict[int, HangReport], stuck: StuckCollective
) -> tuple[list[int], list[str]]:
    """Ranks whose collective no other step has in this place, while some step has that of the others.

    Where some step has either, because a program does something every N steps: ranks for whose collective
    this step is not the Nth.
    """
    positions = {
        rank: _same_position_in_other_steps(by_rank[rank], stuck.key, call)
        for rank, call in stuck.waiting.items()
    }
    steps: dict[Signature, list[int]] = {}
    for by_step in positions.values():
        for step, position in by_step.items():
            if position.here is not None and step not in steps.setdefault(position.here, []):
                steps[position.here].append(step)
    number = min(call.step for call in stuck.waiting.values())
    right = {signature(call) for call in stuck.waiting.values()} & steps.keys()
    if len(right) > 1:
        falls = {candidate: _falls_on(number, sorted(steps[candidate])) for candidate in right}
        right = {candidate for candidate in right if falls[candidate]} or {
            candidate for candidate in right if falls[candidate] is None
        }
    if len(right) != 1:
        return [], []
    (usual,) = right
    departed = [rank for rank, call in stuck.waiting.items() if signature(call) != usual]
    unseen = [rank for rank in departed if _is_unseen(by_rank[rank], stuck, rank, usual)]
    if unseen and _falls_on(number, sorted(steps[usual])) is not True:
        return [], [
            f"rank {rank} issued {signature(stuck.waiting[rank])}, which no other step listed here has:"
            " either it is one too many, or the others left out what comes every so many steps"
            for rank in unseen[:MOST]
        ]
    notes = []
    for rank in departed[:MOST]:
        step = min(steps[usual], key=lambda step: (abs(step - number), step))
        in_step = [by_step[step] for by_step in positions.values() if step in by_step]
        following = next((position.following for position in in_step if position.here == usual), None)
        verb = (
            "skipped"
            if following == signature(stuck.waiting[rank])
            else "issued another collective in place of"
        )
        notes.append(f"rank {rank} {verb} {usual}, which step {step} had in this place")
    return departed, notes


def _is_unseen(report: HangReport, stuck: StuckCollective, rank: int, usual: Signature) -> bool:
    """True where the rank's collective is in no other step of its report, and its step may yet come to the
    usual one: a program that does something every so many steps looks like that too."""
    group, call = _group_of(report, stuck.key), stuck.waiting[rank]
    calls = [] if group is None else group.calls
    if any(signature(other) == signature(call) for other in calls if other.step != call.step):
        return False
    later = [signature(other) for other in calls if other.step == call.step and other.seq > call.seq]
    return usual in later or not later


def _falls_on(number: int, steps: list[int]) -> bool | None:
    """True where evenly spaced steps (two or more apart) go on with this number; None where steps are not."""
    earlier = [step for step in steps if step < number]
    distances = {b - a for a, b in pairwise(earlier)}
    if len(distances) != 1 or min(distances) < 2:
        return None
    return number - earlier[-1] in distances


class Position(NamedTuple):
    """The collective that a step had in the place of a call, and the next one; None beyond the step's end."""

    here: Signature | None
    following: Signature | None


def _same_position_in_other_steps(report: HangReport, key: str, call: CallState) -> dict[int, Position]:
    """Each other whole step at the position of this call, by step; empty where the report does not tell."""
    group = next(group for group in report.groups or () if group.key == key)
    steps: dict[int, list[CallState]] = {}
    for call_in_step in group.calls:
        steps.setdefault(call_in_step.step, []).append(call_in_step)
    unsure = {max(steps)}  # may be under way
    num_before = sum(
        1 for _ in takewhile(lambda earlier_call: earlier_call.finished is not False, group.calls)
    )
    # Calls before the listed ones are left out; what follows an unfinished one is cut at its end.
    first_is_cut = num_before >= LISTED_BEFORE
    if first_is_cut:
        unsure.add(min(steps))
    whole_steps = [step for step in steps if step not in unsure | {call.step}]
    if not whole_steps or (first_is_cut and call.step == min(steps)):
        return {}
    index = steps[call.step].index(call)
    positions = {}
    for step in whole_steps:
        here, following, *_ = [*map(signature, steps[step][index : index + 2]), None, None]
        positions[step] = Position(here, following)
    return positions


def _skips(by_rank: dict[int, HangReport], stuck: StuckCollective) -> list[str]:
    """Note on earlier collectives that ranks issued in different steps: a rank ahead left one out before."""
    steps: dict[int, dict[int, int]] = {}
    for rank, report in by_rank.items():
        for group in report.groups or ():
            if (group.key, tuple(group.ranks)) == (stuck.key, stuck.ranks):
                for call in group.calls:
                    steps.setdefault(call.seq, {})[rank] = call.step
    for seq in sorted(steps):
        row = steps[seq]
        if len(row) > 1 and len(set(row.values())) > 1:
            usual = Counter(row.values()).most_common(1)[0][0] if len(row) > 2 else min(row.values())
            ahead = sorted(rank for rank, step in row.items() if step > usual)
            if ahead:
                return [
                    f"{_ranks(ahead)} issued #{seq} of group {stuck.name} in step {row[ahead[0]]}, others in "
                    f"step {usual}: a collective was left out there before, or the others issued one more"
                ]
    return []


# ---- in words ----------------------------------------------------------------------------------


def sentence(finding: HangFinding) -> str:
    """The answer in one line, notes behind it."""
    silent = [f"no report from {_ranks(finding.silent)}"] if finding.silent else []
    return "; ".join([*_answer(finding), *finding.notes, *silent])


def _answer(finding: HangFinding) -> list[str]:
    """What stands before the notes; empty where they are the answer."""
    ranks, stuck = finding.ranks, finding.stuck
    if stuck is None:
        if ranks:
            are = "is" if len(ranks) == 1 else "are"
            return [f"no rank waits in a collective that was recorded; {_ranks(ranks)} {are} behind"]
        return ["no rank waits in a collective that was recorded, and no rank is behind the others"]
    waiting = _ranks(stuck.waiting)
    if finding.kind == "absent":
        return [f"{_ranks(ranks)} {_have(ranks)} not come to {_call_text(stuck)}; {waiting} waiting there"]
    if finding.kind == "all_inside":
        are_in = "is in" if len(stuck.waiting) == 1 else "are all in"
        return [f"{waiting} {are_in} {_call_text(stuck)}: none is missing, look at devices and links"]
    are_different = len({comparable(call) for call in stuck.waiting.values()}) > 1
    if finding.kind == "mismatch" and are_different:
        return [_mismatch_text(ranks, stuck)]
    return []  # a ring, or the same collective in different steps


def _mismatch_text(ranks: list[int], stuck: StuckCollective) -> str:
    usual = next((call for rank, call in stuck.waiting.items() if rank not in ranks), stuck.call)
    issued = [signature(stuck.waiting[rank]) for rank in ranks if rank in stuck.waiting]
    others = [signature(call) for call in stuck.waiting.values() if signature(call) != signature(usual)]
    return (
        f"{_ranks(ranks) if ranks else 'some ranks'} issued {(issued + others)[0]} where others issued"
        f" {signature(usual)} (#{stuck.seq} of group {stuck.name}, step {usual.step})"
    )


def _call_text(stuck: StuckCollective) -> str:
    call = stuck.call
    return f"{signature(call)} (#{stuck.seq} of group {stuck.name}, step {call.step})"


def _waits(rank: int, waits_in: dict[int, StuckCollective]) -> str:
    stuck = waits_in[rank]
    return (
        f"rank {rank} waits in {signature(stuck.waiting[rank])} (#{stuck.seq} of group {stuck.name})"
        f" for {_ranks(stuck.absent)}"
    )


def _behind(by_rank: dict[int, HangReport], silent: list[int]) -> list[int]:
    if silent:
        return silent
    num_steps = {rank: report.num_steps for rank, report in by_rank.items()}
    max_num_steps = max(num_steps.values())
    return sorted(rank for rank, num in num_steps.items() if num < max_num_steps)


def _ranks(ranks: "Sequence[int] | dict[int, CallState]") -> str:
    rows = sorted(ranks)
    text = ", ".join(map(str, rows[:MOST])) + (", ..." if len(rows) > MOST else "")
    return f"rank {text}" if len(rows) == 1 else f"ranks {text}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"

"""From findings to causes: what each takes out of the account, with an interval; the largest first."""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import numpy as np

from aorta.account.cause import (
    HIDDEN_LESS,
    MENDED_ERROR,
    MENDED_LESS,
    MENDED_MORE,
    Cause,
    CauseKind,
    Limit,
    ratio_interval,
)
from aorta.account.judge.alike import is_whole_trace
from aorta.account.judge.cells import IDLE_CELLS, LARGE_SHARE, LOSSES, Account, account_of, is_device_busy
from aorta.account.judge.contradictions import please_report
from aorta.account.judge.cores import cores_had
from aorta.account.judge.judged import MOST_NUMBERS, last_holds_the_end, looked_at
from aorta.account.judge.late import LateRank, steps_left_out
from aorta.account.judge.occasional import Occasions, half_width, occasions, of_all_steps
from aorta.account.judge.outside import rank_outside
from aorta.account.judge.phases import growth_text, line_of_evaluation
from aorta.account.judge.stacks import in_modules, is_a_wait, sampled_ms, samples_of
from aorta.account.model import Causes, Dataset, Run, WhatIfs, once_of_run
from aorta.account.numbers import counted, quantity
from aorta.account.rows import positive
from aorta.records.files import TRACE_FOLDER
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.statistics import MIN_STEPS, estimate, side
from aorta.timeline.types import TRACE_SOURCES
from aorta.why.causes.arguments import told_by_argument
from aorta.why.causes.code_lines import (
    calls_model,
    holds_hooks,
    is_dispatched,
    issued_text,
    issuer_of,
    line_of,
    makes_groups,
    sends_own_data,
    waiting_calls,
    waiting_line,
    waits_text,
)
from aorta.why.causes.contradictions import Exposures, without_contradictions
from aorta.why.causes.finding import WAIT, CauseFinding
from aorta.why.causes.losses.of_a_step import CALLS_THE_MODEL, RARE, SEEN, findings
from aorta.why.causes.losses.outside import outside_cause
from aorta.why.causes.losses.program_code import calls_of_spans
from aorta.why.causes.losses.slow_steps import slow_of_all_steps
from aorta.why.causes.losses.waiting import OF_ITS_RANK, PART_KINDS, left_out, loading_left_out
from aorta.why.causes.program import (
    BLOCKING_WAITS,
    COMPILES_NOT,
    NOTHING_LEFT,
    hides_all,
    program_of,
    rows_of,
    settings_text,
    stack_of,
    threads_variable,
    traced_optimizer,
    without_in_force,
    workers_of,
)
from aorta.why.causes.rules import CauseRule, instead_of, rules
from aorta.why.causes.source import (
    goes_through,
    indexes_alone,
    is_called_anew,
    is_of_sampler,
    made_in,
    module_made_in,
    pieces_of_run,
    rounds_around,
    sends_of,
    source_of,
)
from aorta.why.causes.text import (
    FEWEST_STEPS,
    fact_texts,
    filled,
    in_line,
    notes,
    nothing_text,
    of_one_rank_text,
    of_trace,
    rows_text,
    seen_text,
    title,
)
from aorta.why.causes.worker_lines import told_by_workers

MOST_SHOWN = 5
OF_KERNELS = ("compute", "imbalance")
"""Kinds of which a device's kernels are the measure: recording makes none of them longer."""
OF_THEIR_LINE: tuple[CauseKind, ...] = (
    *("small_messages", "program_code", "pause", "between_steps", "checkpoint", "optimizer", "memory"),
)
"""Kinds whose remedy is to do their line's work less often or otherwise: whatever else is lost in that line
goes with it."""
SEVERAL_READS = 2
"""Of values of the device, in a line and a step: a loop within the step reads them."""
EVALUATES = re.compile(r"eval|valid|accura|perplex|metric|(?:^|[._])test", re.IGNORECASE)
"""In names of functions that call the model and learn nothing."""
IN_AN_UPDATE = 8
"""Optimizer steps that learn from what was gathered before the first of them, at most."""
ECHO = 0.4
"""Of a rank whose host launches late, that what all ranks lose must be to stand before it: no more is known
of that host, and what all lose makes it launch more."""
ANEW: tuple[CauseKind, ...] = ("program_code", "between_steps")
"""Kinds of which a loop is told that calls the same for each tensor."""
MAY_GROW: tuple[CauseKind, ...] = ("late_rank", "program_code", "data_loading", "between_steps")
"""Kinds of the program's own code, which may go through more from step to step."""
OF_MESSAGES = ("small_messages", "transfer")
WAITED_FOR = ("small_messages", "small_units")
"""Kinds of many calls, each of which a setting may make the host wait for."""
OF_OPERATIONS = ("compute", "transfer")
"""Kinds of which two in one line have remedies of their own."""
OF_OWN_CODE = ("program_code", "between_steps", "checkpoint", *OF_MESSAGES)
"""Kinds of which two, one of them of messages, are one loss where both are in one function of the program or
one calls the other: who leaves its messages out leaves out what prepares them."""
FEW_STEPS_FACTOR = 2
"""Where the steps of a run are too few for an interval, a loss must be this much larger. A trace is of few
steps, and what was asked for."""
OF_EXTREMES = 6
"""Independent values hold their median between the least and the largest of them 31 times of 32: enough for
sums of several passes a step, which are alike."""
NEARLY_ALL = 0.8
"""Of the steps, or of a loss."""
MOSTLY = 0.7
"""Of a loss, that slow steps must have for it to be theirs."""
UNLIKE = 0.75
"""Mean over median below which it is not in all steps, as a loss in every second one."""
LESS: tuple[CauseKind, ...] = (
    *("program_code", "transfer", "no_prefetch", "wide_dtype", "small_units", "bubble"),
)
BY_IDLE_TIME: tuple[CauseKind, ...] = (
    *("launch_bound", "synchronisation", "optimizer", "late_rank", "program_code", "small_units"),
)
"""Kinds that spans of the host or bytes do not bound."""
REFILLED: tuple[CauseKind, ...] = ("launch_bound", "synchronisation", "late_rank", "transfer")
"""Kinds of which a device has the time again for sure, and its host may have none."""
IN_NO_CALL = "in no call that aorta knows: time.sleep, a lock, a file, a pipe, another thread or process"
MAKES = "new_group() of torch.distributed"
NEED_A_LINE = ("asleep", "slow_steps")
"""Pauses in no line of the program, though its stacks were sampled, are noise of the machine, torch's
other threads that lack cores, longer batches, or data that the model gathers for several steps."""
WORKERS_0 = "workers (num_workers=0 at {loader_site})"
OR_WORKERS = "; or let workers of a DataLoader do it beforehand"
LEAST_OF_HOST = 0.05
"""Of a step, by which work of the device must shorten it that is large enough without regard to the host."""
LEFT_IN_FORCE = 0.25
"""Of the step, that a loss must be for what is left of a remedy whose best part is set, since that changes
what is trained."""
Named = tuple[Cause, dict[str, float]]
"""A cause, and what it takes of each cell."""


def causes_of(dataset: Dataset, path: str = "", *, replays: bool = True) -> Causes:
    """Of the dataset's first run, with their words. path: for the commands that check a change, the run's own
    unless given. replays: with what-ifs of its traces."""
    run = dataset.first
    found = found_causes(run, shlex.quote(path or str(run.path)))
    return msgspec.structs.replace(
        found,
        title=title(dataset),
        empty_text=nothing_text(dataset, found),
        notes=notes(found, run),
        whatifs=_whatifs(dataset) if replays else None,
    )


def _whatifs(dataset: Dataset) -> WhatIfs | None:
    run = dataset.first
    traces = run.path if run.source == "kineto" else Path(run.path, TRACE_FOLDER)
    if run.source != "kineto" and not traces.is_dir():
        return None
    from aorta.why.causes.whatifs import whatifs_of  # runs without traces need no replay

    return whatifs_of(dataset, traces)


def late_rank(judged: Run) -> LateRank | None:
    """The rank that the others wait for most, of the largest cause of which one rank is late."""
    for cause in found_causes(judged).listed:
        if cause.is_waited_for and cause.rank is not None:
            # Of steps that were left out: the newest ones are, and the recorded ones may be long ago.
            is_of_run = cause.is_in_step or cause.kind == "between_steps"
            part = 1.0 if is_of_run else steps_left_out(judged).mean()
            if not cause.is_in_step and is_of_run:  # each of the others waits for all of it
                part = 1 - 1 / len(judged.ranks)
            return LateRank(cause.rank, float(cause.ms / part))
    return None


@once_of_run
def found_causes(judged: Run, path: str = "RUN") -> Causes:
    """Causes alone, and what none of them takes."""
    account = account_of(judged)
    looked = looked_at(judged)
    if not account.mean_step_ms > 0:
        return Causes([])
    if account.contradiction:
        return Causes([], cannot_tell=[account.contradiction])
    if (num := account.step_ms.shape[1]) < FEWEST_STEPS and judged.source not in TRACE_SOURCES:
        return Causes([], no_loss=[f"{counted(num, 'judged step')}: too few to name a cause."])
    rule_of, stack = rules(), stack_of(looked)
    ledger = Ledger(account)
    named: list[Named] = []
    cannot_tell: list[str] = []
    no_loss: list[str] = []
    leaves_cores = False
    told: list[dict[str, float]] = []
    exposures = Exposures(looked)
    rare = slow_of_all_steps(judged, account.global_step, account.on_device)
    of_account = findings(
        looked, account, _slow_steps(judged, looked), None if rare is None else rare.occasions
    )
    found = [(finding, ledger.take(finding)) for finding in of_account]
    for finding, taken in found:
        _keep(finding, sum(taken.values()))
        room = _Room(
            _may_go_too(taken, ledger),
            _most_ms(account, ledger),
            _waited_ms(finding, account),
            sum(account.mean_ms(name) - taken.get(name, 0.0) for name in IDLE_CELLS),
        )
        cause = cause_of(finding, rule_of[finding.kind], looked, account, stack, path, room)
        if cause is None and finding.facts.get("op") == "launches":
            no_loss += _of_equal_hosts(finding, account)
        wrong = None if cause is None else exposures.exceeded(finding, taken)
        instead = "" if cause is None else _of_no_usual_step(cause, finding, looked, account)
        if cause is not None and wrong is not None:
            cannot_tell.append(please_report(f"what {cause.subject} costs", wrong))
        elif instead:
            no_loss.append(instead)
            leaves_cores = leaves_cores or finding.facts.get("op") == "threads"
            told.append(taken)
        elif cause is not None:
            if unshared_ms := finding.facts.get("unshared_ms"):  # of which a part may stay
                told.append({"wait": unshared_ms - finding.mean_ms})
            rows = rows_text(taken, account)
            cause = msgspec.structs.replace(cause, evidence=(*cause.evidence, *([rows] if rows else [])))
            named.append((cause, taken))
    outside = outside_cause(account, path, line_of_evaluation(looked), rank_outside(judged))
    if outside is not None:
        # The others' waiting for it is that again.
        again = [one for one in named if outside.rank == one[0].rank is not None and one[0].is_waited_for]
        again = [one for one in again if one[0].ms <= (outside.interval_ms or (0.0, outside.ms))[1]]
        told += [taken for _, taken in again]
        waits_ms = min(outside.ms, ledger.left.get("wait", 0.0))
        taken = {"wait": waits_ms} if outside.rank is not None and waits_ms > 0 else {}
        named = [*(one for one in named if one not in again), (outside, taken)]
    is_told = any(one.kind == "data_loading" and one.rank is None for one, _ in named)
    late = left_out(judged) or loading_left_out(judged, is_told)
    # What one is starved of in recorded steps, it is named for by these.
    starved = {
        one.rank for one, _ in named if late and late.facts.get("op") == "starved" and one.is_waited_for
    }
    beside = [] if late is None or late.rank in starved else [(late, steps_left_out(judged))]
    beside += [] if rare is None else [(rare, np.ones(judged.num_judged, dtype=bool))]
    for finding, chosen in beside:
        of_it = _of_others(finding, chosen, rule_of[finding.kind], judged, account, stack, path)
        named += [(cause, _of_its_row(cause, named, account, chosen)) for cause in of_it]
    found_all = [cause for cause, _ in named]
    named.sort(key=lambda one: _place(one[0], found_all))
    named = _once(named, looked)[:MOST_SHOWN]
    named, more = without_contradictions(named, account, stack)
    left = {name: account.mean_ms(name) for name in LOSSES if name in account.cells}
    for taken in (*told, *(taken for _, taken in named)):
        for name, ms in taken.items():
            if name in left:
                left[name] = max(left[name] - ms, 0.0)
    return Causes(
        [told_by_argument(cause, looked) for cause, _ in named],
        dict(sorted(left.items(), key=lambda entry: -entry[1])),
        [*cannot_tell, *more],
        no_loss,
        leaves_cores,
    )


def _of_no_usual_step(cause: Cause, finding: CauseFinding, judged: Run, account: Account) -> str:
    """What is said instead of a cause that mends no usual step; '' where it does."""
    values, subject = np.nan_to_num(finding.ms), f"{cause.subject[:1].upper()}{cause.subject[1:]}"
    was_seen = finding.kind in SEEN or (finding.kind == "pause" and "op" not in finding.facts)
    slow, line = finding.occasions, cause.line
    if slow is not None:
        # An evaluation that calls eval(), or has a loader, is in no step; of others the name tells.
        may_be = finding.kind == "pause" or 0 < (slow.period or 0) <= IN_AN_UPDATE
        may_be = may_be and finding.facts.get("op") == "slow_steps"
        may_be = may_be and (line is None or EVALUATES.search(line.function) is None)
        steps = (account.global_step[slow.is_slow], account.global_step[~slow.is_slow])
        if not may_be or line is None or in_modules(judged, *steps) < CALLS_THE_MODEL:
            return ""
        return (
            f"{subject}: {quantity(cause.ms, 'ms')} a step. The model is called there: data for an update of"
            " several optimizer steps, or a longer batch, is no loss; an evaluation can come less often."
        )
    if finding.facts.get("op") == "threads" and line is not None and not finding.facts["is_alone"]:
        facts = finding.facts
        return (
            f"The program sets torch's threads itself, in {line.text}: {facts['threads']} in each process,"
            f" of {facts['whole_cores']} cores. Where nothing else is to have them, {facts['enough']}"
            f" threads {facts['saves']} {quantity(cause.ms, 'ms')} of a step."
        )
    if sends_own_data(calls := waiting_calls(finding, judged), judged):
        return (
            f"{subject}: {quantity(cause.ms, 'ms')} a step; {waits_text(calls)}, and that function gives it"
            " data of the program's own. Where these depend on what it reads, as of a simulator, nothing can"
            " be read later, and none of it is lost."
        )
    # A single step, as of a trace that marks none, is all that is known: a share of it says what it can.
    is_once = finding.facts.get("in_steps") == 1 < len(values) and cause.interval_ms is None
    if finding.kind in SEEN and is_once:
        # As long as it was, which what recorded steps are scaled by would change.
        noted = calls_of_spans(judged, "garbage_collection", finding.rank).values()
        is_noted = finding.kind == "garbage_collection" and noted
        took = (
            f"{quantity(sum(ms for _, ms in noted) / sum(num for num, _ in noted), 'ms')} "
            if is_noted
            else ""
        )
        return (
            f"{subject}: {took}in one of {len(values)} judged steps. Once does not tell how often it comes,"
            f" nor what a step loses to it. Where it comes often: {cause.change}."
        )
    is_one = len(values) >= MIN_STEPS and values.max() >= NEARLY_ALL * values.sum() > 0
    if was_seen or finding.is_risk or finding.rank is not None or not is_one:
        return ""
    step, most_ms = account.global_step[int(values.argmax())], quantity(float(values.max()), "ms")
    return f"{subject}: {most_ms} in step {step} alone, as a first use has them: no loss of each step."


def _of_equal_hosts(finding: CauseFinding, account: Account) -> Iterator[str]:
    """What is said of a rank that launches last, though its host is hardly slower than the others'."""
    waited_ms, longer_ms = finding.facts["waited_ms"], finding.facts["longer_ms"]
    is_large = waited_ms >= LARGE_SHARE * account.mean_step_ms
    if is_large and longer_ms is not None and longer_ms <= waited_ms / 4:
        longer = f"{quantity(longer_ms, 'ms')} longer" if longer_ms > 0 else "no longer"
        yield (
            f"The others wait {quantity(waited_ms, 'ms')} a step for {finding.facts['who']}, which launches"
            f" last. Its host takes {longer} than theirs: the rest is the order in which hosts launch that"
            " are all as slow. Fewer launches on all ranks shorten it."
        )


class Ledger:
    """Mean ms of a step that are left in each cell of the account: a finding explains each of them once, and
    none that no cell holds."""

    def __init__(self, account: Account) -> None:
        self.left = {name: account.mean_ms(name) for name in account.cells}

    def take(self, finding: CauseFinding) -> dict[str, float]:
        """Take the finding's mean loss out of its cells; what they gave, by cell."""
        taken: dict[str, float] = {}
        for cells, share in finding.takes.items():
            asked = share * finding.mean_ms
            for cell in cells:
                given = min(asked, self.left.get(cell, 0.0))
                if given > 0:
                    self.left[cell] -= given
                    taken[cell] = taken.get(cell, 0.0) + given
                    asked -= given
        return taken


def _once(named: list[Named], judged: Run) -> list[Named]:
    """A rank that is waited for because its batches are longer is one cause, told how to mend it."""
    longer = {cause.rank: cause for cause, _ in named if cause.kind == "imbalance"}
    late = {cause.rank for cause, _ in named if cause.kind == "late_rank"} & set(longer) - {None}
    told = []
    for cause, taken in named:
        if cause.rank in late and cause.kind == "late_rank":
            reason = longer[cause.rank]
            evidence = (*cause.evidence, *reason.evidence[:1])
            cause = msgspec.structs.replace(cause, evidence=evidence, change=reason.change)
        if cause.rank not in late or cause.kind != "imbalance":
            told.append((cause, taken))
    return _once_a_line(told, judged)


def _once_a_line(named: list[Named], judged: Run) -> list[Named]:
    """A smaller cause of the line of a larger one, where both are one loss, becomes a sentence of that."""
    told: list[Named] = []
    for cause, taken in named:
        place = next((place for place, one in enumerate(told) if _is_in(one, (cause, taken), judged)), None)
        if place is None:
            told.append((cause, taken))
            continue
        larger, its = told[place]
        is_same = larger.kind == cause.kind or _is_of_one_rank(larger, cause)
        if is_same or _is_of_messages(larger, cause, judged) or _is_of_dealing(larger, cause):
            part = _part_beyond((larger, its), (cause, taken))
            told[place] = (
                _with(larger, cause, part) if part > 0 else larger,
                {name: its.get(name, 0.0) + taken.get(name, 0.0) for name in its | taken},
            )
            continue
        text, interval, bound = "of it are", larger.interval_ms, larger.bound_ms
        if _need_the_same_cores(larger, cause):
            text = "of another loss would need the same cores, which can be had once:"
        elif "pause" not in (cause.kind, larger.kind) and interval is not None and bound is not None:
            text, more = "more may go with it:", min(cause.ms, bound)
            interval, bound = (interval[0], interval[1] + more), bound - more
        if "pause" not in (cause.kind, larger.kind):
            its = {name: its.get(name, 0.0) + taken.get(name, 0.0) for name in its | taken}
        evidence = (*larger.evidence, f"{quantity(cause.ms, 'ms')} {text} {cause.subject}")
        larger = msgspec.structs.replace(larger, evidence=evidence, interval_ms=interval, bound_ms=bound)
        told[place] = larger, its
    return told


def _is_of_messages(larger: Cause, cause: Cause, judged: Run) -> bool:
    """Whether one is of messages and both are of one line or function, or one of the line that calls the
    other's."""
    lines, kinds = [one.line for one in (larger, cause)], {larger.kind, cause.kind}
    # Ranks that wait in a barrier behind a checkpoint wait for the one that saves.
    is_late = (larger.is_waited_for or cause.is_waited_for) and "checkpoint" not in kinds
    if None in lines or is_late or _is_one_in_no_step(larger, cause):
        return False
    if not (kinds <= set(OF_OWN_CODE) and kinds & set(OF_MESSAGES)):
        return False
    first, second = lines
    assert first is not None
    assert second is not None
    is_one = (first.file, first.function) == (second.file, second.function)
    is_one = is_one and sampled_ms(judged, first.file, first.function) > 0
    # What is computed of results goes with them, in a function that holds the loop as well.
    is_one = is_one or (first.text == second.text and "results" in (larger.origin, cause.origin))
    if first.file == second.file and "object" in (larger.origin, cause.origin):
        source = source_of(first.file, judged.noted)
        (at, of_at) = (second.line, first.line) if larger.origin == "object" else (first.line, second.line)
        is_one = is_one or (source is not None and sends_of(source.tree, at, of_at))
    return is_one or first.caller == second.text or second.caller == first.text


def _part_beyond(larger: Named, other: Named) -> float:
    """Of the other, which the larger one has not: a loss of all steps has that of recorded ones in it, but
    for what cells hold beyond that."""
    (cause, _), (second, _) = larger, other
    if cause.is_in_step == second.is_in_step:
        return 1.0
    (of_step, _), (_, held) = (larger, other) if cause.is_in_step else (other, larger)
    beyond_ms = min(max(of_step.ms + sum(held.values()) - cause.ms, 0.0), second.ms)
    return beyond_ms / second.ms if beyond_ms else 0.0  # a risk has 0 ms


def _with(larger: Cause, cause: Cause, part: float) -> Cause:
    """Both in one. part: of the other, which the larger one has not."""
    interval, bound = larger.interval_ms, larger.bound_ms
    if interval is not None:
        low, high = (part * ms for ms in cause.interval_ms or (0.0, cause.ms))
        most = min(max(interval[1], larger.ms + high), larger.ms / larger.share)
        bound = None if bound is None else max(bound - (most - interval[1]), 0.0)
        interval = interval[0] + low, most
    is_known = larger.kind != "late_rank" or larger.line is not None or not cause.is_waited_for
    is_known &= cause.origin not in ("results", "object")  # without these the rest has little to do
    were = "were" if cause.is_in_step else "were not"
    is_of_others = not (larger.is_in_step and cause.is_in_step)
    where = f", as steps show that {were} recorded" if is_of_others else ""
    return msgspec.structs.replace(
        larger,
        change=larger.change if is_known else cause.change,
        ms=larger.ms + part * cause.ms,
        share=larger.share + part * cause.share,
        interval_ms=interval,
        bound_ms=bound,
        evidence=(*larger.evidence, f"{quantity(part * cause.ms, 'ms')} of it are {cause.subject}{where}"),
    )


def _place(cause: Cause, named: list[Cause]) -> tuple[float, bool]:
    """The largest first, behind what makes all slower; but what more cores would save behind a rank that is
    waited for, and cores that the program itself leaves out behind all others, a bubble behind unequal
    stages, whose part of it is known, and a rank whose host launches late behind what all ranks lose, where
    that is of its size. Launches come behind what records prove needless, where it is not sure which is
    larger: that needs no other program."""
    if cause.kind == "program_code" and not cause.ms:
        return -math.inf, False
    first: list[Cause] = []
    if cause.kind == "launch_bound" and cause.interval_ms is not None:
        needless = [(one, one.interval_ms) for one in named if one.origin == "accumulated"]
        first = [one for one, interval in needless if interval and interval[1] > cause.interval_ms[0]]
    elif cause.kind == "bubble":
        first = [one for one in named if one.kind == "late_rank"]
    elif cause.kind == "core_taken" or cause.origin == "threads":
        is_asked_for = cause.origin == "threads" and cause.line is not None
        first = [one for one in named if one.is_waited_for or (is_asked_for and one is not cause)]
    elif cause.kind == "late_rank" and cause.origin == "launch":
        first = [one for one in named if not one.is_waited_for and one.ms >= ECHO * cause.ms]
    most_ms = min((one.ms for one in first), default=math.inf)
    return -min(cause.ms, most_ms), most_ms < cause.ms


def _is_of_one_rank(larger: Cause, cause: Cause) -> bool:
    """Whether the others wait for one rank for both, and of one no more is known."""
    is_one = larger.rank == cause.rank is not None and larger.is_waited_for and cause.is_waited_for
    return is_one and "late_rank" in (larger.kind, cause.kind) and larger.is_in_step and cause.is_in_step


def _is_one_in_no_step(*both: Cause) -> bool:
    """Whether one is an evaluation in no step, without which no step gets shorter, and the other is not."""
    return len({one.kind == "between_steps" and not one.is_in_step for one in both}) > 1


def _is_of_dealing(larger: Cause, cause: Cause) -> bool:
    """Whether the others wait for a rank in the line in which it hands out batches."""
    is_there = larger.line is not None and cause.line is not None and larger.line.text == cause.line.text
    return is_there and cause.is_waited_for and larger.origin == "dealt"


def _need_the_same_cores(*both: Cause) -> bool:
    """Whether cores that idle would be threads' of torch for one, and a loader's workers' for the other."""
    return {one.origin for one in both} == {"threads", "workers"}


def _is_late_by(one: Named, other: Named) -> bool:
    """Whether a rank is late by what is named already: it spends more on just that, or all ranks lose as much
    of a row to it as this one has more there."""
    (larger, its), (cause, taken), kind_of = one, other, dict(PART_KINDS)
    own = max(taken.keys() - {*WAIT}, key=lambda name: taken[name], default="")
    is_it = kind_of.get(own) == larger.kind and own not in OF_ITS_RANK
    goes_too = is_it or its.get(own, 0.0) >= cause.ms
    is_its = larger.ms >= cause.ms and larger.rank in (None, cause.rank)
    return cause.kind == "late_rank" and own in kind_of and goes_too and is_its


def _is_in(one: Named, other: Named, judged: Run) -> bool:
    """Whether both are one loss. Of pauses, sleep and evaluations take no compute, and slow steps do."""
    larger, cause = one[0], other[0]
    is_same = _is_late_by(one, other) or _need_the_same_cores(larger, cause)
    is_of_all = (larger.kind, larger.change, larger.rank) == (cause.kind, cause.change, None)
    is_same = is_same or (is_of_all and cause.is_waited_for) or _is_of_messages(larger, cause, judged)
    if is_same or _is_of_one_rank(larger, cause) or _is_of_dealing(larger, cause):
        return True
    if larger.line is None or cause.line is None or _is_one_in_no_step(larger, cause):
        return False
    # What gave memory back, its caller asks the driver for again.
    lines = (larger.line.text, larger.line.caller if larger.kind == "memory" else "")
    if cause.line.text not in lines:
        return False
    if larger.kind == cause.kind:
        return larger.kind not in OF_OPERATIONS
    is_apart = any(each.kind == "pause" and "compute" not in taken for each, taken in (one, other))
    return larger.kind in OF_THEIR_LINE and not is_apart and larger.rank == cause.rank


def _of_others(
    finding: CauseFinding,
    chosen: Flags,
    rule: CauseRule,
    judged: Run,
    account: Account,
    stack: frozenset[str],
    path: str,
) -> Iterator[Cause]:
    """The cause of what is lost in these judged steps, of which the account, which is of recorded ones, has
    none or too few."""
    step_ms = judged.values("step_ms")
    of_these = replace(
        account,
        global_step=judged.global_step[judged.judged_steps][chosen],
        step_ms=step_ms[:, chosen],
        cells={},
        tails={},
        usual=None,
    )
    cause = cause_of(finding, rule, judged, of_these, stack, path, _Room(0.0, of_these.mean_step_ms))
    if cause is not None and not _of_no_usual_step(cause, finding, judged, of_these):
        part, interval = float(chosen.mean()), cause.interval_ms
        yield msgspec.structs.replace(
            cause,
            ms=part * cause.ms,
            interval_ms=None if interval is None else (part * interval[0], part * interval[1]),
            bound_ms=None,
            share=part * cause.ms / float(np.nanmean(step_ms)),
            # Waits are known of recorded steps alone.
            check=f"aorta compare {path} NEW; the step time, which is of all judged steps, should fall",
            is_in_step=False,
        )


def _of_its_row(cause: Cause, named: list[Named], account: Account, chosen: Flags) -> dict[str, float]:
    """What cells hold of a cause of these judged steps: what its row has left, as recorded steps show the
    same, then what unrecorded ones are longer by. A cause of all steps has the whole row in it, also what
    other causes took of that."""
    row = next(
        (name for name, kind in PART_KINDS if kind == cause.kind), "wait" if cause.is_waited_for else ""
    )
    left = {
        name: max(account.mean_ms(name) - sum(taken.get(name, 0.0) for _, taken in named), 0.0)
        for name in (row, "unrecorded")
    }
    again_ms = min(left[row], cause.ms)
    more_ms = min(left["unrecorded"], cause.ms - (account.mean_ms(row) if chosen.all() else again_ms))
    return {name: ms for name, ms in ((row, again_ms), ("unrecorded", more_ms)) if ms > 0}


def _slow_steps(judged: Run, looked: Run) -> Occasions | None:
    """Slow steps among those of the account, where that has some of the judged steps alone."""
    if looked.num_judged == judged.num_judged or judged.num_judged * len(judged.ranks) > MOST_NUMBERS:
        return None
    step_ms = positive(judged.values("step_ms")).mean(axis=0)
    if last_holds_the_end(judged):
        step_ms = step_ms[:-1]
    global_step = judged.global_step[judged.judged_steps][: len(step_ms)]
    return of_all_steps(step_ms, global_step, looked.global_step[looked.judged_steps])


def _keep(finding: CauseFinding, mean_ms: float) -> None:
    """Shorten a finding to what its cells gave."""
    claimed_ms = finding.mean_ms
    if finding.occasions is not None:
        claimed_ms = max(claimed_ms, finding.occasions.mean_ms()[0])
    if not claimed_ms > mean_ms:
        return
    part = mean_ms / claimed_ms
    finding.shorten(part)
    for name in ("part_ms", "others_ms", "per_call_ms", "per_unit_ms", "host_ms"):
        if finding.facts.get(name) is not None and finding.kind != "copy":  # so long the device copies
            finding.facts[name] *= part


def _may_go_too(taken: dict[str, float], ledger: Ledger) -> float:
    """ms of the mean step that nothing explains and that may go with a loss: what is left in its cells, and
    the waiting of ranks for each other, which long and uneven work makes."""
    names = {*taken, "wait"} - {"compute", "hidden", "transfer", "communication"}
    return sum(ledger.left.get(name, 0.0) for name in names)


def _most_ms(account: Account, ledger: Ledger) -> float:
    """What mending may save at most: the mean step but for the work in it that no finding has taken, which
    may shrink as well."""
    work_ms = ledger.left.get("compute", 0.0) + ledger.left.get("hidden", 0.0)
    return account.own_step_ms - work_ms * math.exp(-MENDED_ERROR)


def _waited_ms(finding: CauseFinding, account: Account) -> float:
    """What the others wait for the finding's rank, for whatever reason: without it they take the rest of the
    step all the same."""
    if finding.rank is None or account.exposed is None or not _is_waited_for(finding):
        return math.inf
    return float(account.exposed.caused_ms[account.ranks.index(finding.rank)].mean())


def _is_waited_for(finding: CauseFinding) -> bool:
    return finding.rank is not None and any(cells[:2] == WAIT for cells in finding.takes)


@dataclass(frozen=True, slots=True)
class _Room:
    """For the upper end of an interval."""

    more_ms: float
    most_ms: float
    waited_ms: float = math.inf
    idle_ms: float = 0.0
    """For which a device idles for its host as well."""


# ---- what a finding is worth ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worth:
    """Of one finding."""

    ms: float
    """Of the mean step."""
    interval_ms: tuple[float, float] | None
    """95 %"""
    why_no_interval: str = ""
    is_rare: bool = False
    occasions: Occasions | None = None
    """The steps that have the loss, where they come with a period or stand apart."""
    lasts: bool = False
    """The loss is sure, whatever its interval."""

    def is_sure(self, values: Floats, least_ms: float) -> bool:
        """Whether the loss is above half of what is named, with its interval or in nearly every step: where a
        run drifts, another one could lose much more or less, and yet there is no doubt of the loss."""
        if self.lasts or self.interval_ms is None or self.interval_ms[0] > least_ms / 2:
            return True
        finite = values[np.isfinite(values)]
        return bool((finite >= least_ms / 2).mean() >= NEARLY_ALL)

    def printed(
        self, most_ms: float, more_ms: float, errors: tuple[float, float], low: float
    ) -> tuple[tuple[float, float] | None, str]:
        """The interval of what mending saves, on a scale of ratios, which never reaches 0; or why there is
        none. most_ms: that it may come to. more_ms: what may go with the loss and is not in it. errors: by
        how much less, and more, as MENDED_LESS and MENDED_MORE. low: the least part of the loss that another
        measure tells."""
        if self.interval_ms is None or not self.ms > 0:
            return None, self.why_no_interval
        half = max(self.interval_ms[1] - self.ms, self.ms - self.interval_ms[0])
        interval = ratio_interval(self.ms, half, most_ms, more_ms, errors)
        interval = interval and (low * interval[0], interval[1])
        return interval, "" if interval else "the loss differs too much from step to step for an interval"

    @property
    def each_ms(self) -> float:
        """Of a step that has the loss."""
        return self.ms if self.occasions is None else self.occasions.each_ms

    @property
    def often(self) -> str:
        """', every third step'; '' where no period is known."""
        occasions = self.occasions
        return "" if occasions is None or occasions.period is None else f", {occasions.often}"

    def text(self, values: Floats, in_steps: int | None) -> str:
        """How a loss in few steps adds up. in_steps: in which it begins, where others may have the rest."""
        if self.occasions is not None:
            return f"in {self.occasions.text}"
        nonzero = values[np.nan_to_num(values) > 0]
        typical = f"with a median of {quantity(float(np.median(nonzero)), 'ms')}"
        if in_steps not in (None, len(nonzero)):
            typical = f"{quantity(float(nonzero.sum()) / in_steps, 'ms')} each"
        return (
            f"in {in_steps or len(nonzero)} of {len(values)} steps, {typical}: the loss given is the mean"
            " over all steps"
        )


def worth(finding: CauseFinding, global_step: Ints) -> Worth:
    """global_step: of each of the finding's steps."""
    values = finding.ms
    finite = values[np.isfinite(values)]
    if not len(finite) or not finite.any():
        return Worth(0.0, None, finding.facts.get("why_no_size", "no time is lost yet"))
    if finding.occasions is not None:
        return Worth(*finding.occasions.mean_ms(), is_rare=True, occasions=finding.occasions, lasts=True)
    median, mean = float(np.median(finite)), finding.mean_ms
    is_rare = median < RARE * mean or mean < UNLIKE * median
    slow_steps = occasions(values, global_step, finding.slow_steps) if is_rare else None
    if slow_steps is not None and slow_steps.mean_ms()[0] >= MOSTLY * mean:  # else it is in all
        if slow_steps.period is None and slow_steps.are_most_of(has_it := values > 0):
            slow_steps = slow_steps.in_steps(has_it, np.nan_to_num(values))
        slow_ms, interval = slow_steps.mean_ms()
        low, high = (mean - slow_ms + edge for edge in interval)
        return Worth(mean, (low, high), is_rare=True, occasions=slow_steps, lasts=True)
    estimated = estimate(values[None, :], "mean")
    if estimated is None and finding.facts.get("origin") == "accumulated" and len(finite) >= OF_EXTREMES:
        extremes = float(finite.min()), float(finite.max())
        return Worth(mean, extremes, "", is_rare, lasts=finding.is_sure)
    if estimated is None:
        few = f"too few judged steps for an interval: {len(finite)} of {MIN_STEPS}"
        return Worth(mean, None, few, is_rare, lasts=finding.is_sure)
    _, interval = side([estimated])
    if finding.facts.get("op") == "batches":  # chance deals them anew in each step: what drifts is no memory
        half = half_width(finite)
        interval = max(interval[0], mean - half), min(interval[1], mean + half)
    return Worth(mean, interval, "", is_rare, lasts=finding.is_sure)


# ---- a cause of a finding -------------------------------------------------------------------------------


def cause_of(
    finding: CauseFinding,
    rule: CauseRule,
    judged: Run,
    account: Account,
    stack: frozenset[str],
    path: str,
    room: _Room,
) -> Cause | None:
    """None where the loss is too small, or chance."""
    value = worth(finding, account.global_step)
    is_of_kernels = account.on_device and finding.kind in OF_KERNELS
    # Reductions are counted: recording makes steps longer, and no more of them. Nor does it deal batches.
    is_known = finding.is_risk or is_of_kernels or finding.facts.get("origin") == "accumulated"
    is_known |= finding.facts.get("op") == "batches"
    if not is_known and value.each_ms <= account.gap_ms:
        return None
    step = account.mean_step_ms
    # Of late launches, as they are without what times kernels.
    of_program = finding.facts.get("least_part", 1.0) if finding.kind == "launch_bound" else 1.0
    share = value.ms / step
    is_vague = value.interval_ms is None and judged.source not in TRACE_SOURCES
    least = _least_share(rule, finding, judged) * (FEW_STEPS_FACTOR if is_vague else 1)
    least = _least_beside_host(least, finding)
    # Its own time, of what is the program's own.
    is_own = finding.kind == "optimizer" or (finding.kind == "program_code" and "group" in finding.facts)
    if (is_own or finding.facts.get("op") == "slow_steps") and not account.on_device:
        least *= 1 - account.share("core_taken")
    if of_program * share < least or (rule.needs_interval and not value.is_sure(finding.ms, least * step)):
        if not finding.is_risk:
            return None
        value, share = Worth(0.0, None, value.why_no_interval or "no time is lost yet"), 0.0
    if finding.kind == "optimizer" and judged.source == "host" and holds_hooks(judged):
        return None
    sampled, calls = line_of(finding, judged), waiting_calls(finding, judged)
    line = waiting_line(calls) or sampled
    op, origin = finding.facts.get("op"), finding.facts.get("origin")
    is_of_workers = finding.kind == "data_loading" and stack & {"workers", "iterated_anew"} == {"workers"}
    is_handed = line is not None and line.doing == "runs" and origin != "pieces"
    if is_of_workers and is_handed and not value.is_rare:
        return None  # it takes batches out of the workers' hands, which more of them do not shorten
    workers = told_by_workers(finding, judged, stack)
    if workers is not None:
        origin, line = workers.origin, workers.line or line
    needs_line = finding.kind == "pause" and op in NEED_A_LINE
    if line is None and needs_line and samples_of(judged.whole, judged.ranks[0]) is not None:
        return None
    if needs_line and not finding.takes and line and is_a_wait(line.calls) and is_device_busy(judged):
        return None  # slow by their lengths alone: the host was ahead, and lets the device catch up
    facts = fact_texts(finding, judged, account, path) | program_of(judged.noted)[1]
    facts |= traced_optimizer(judged)[1]
    waited_ms = value.each_ms if finding.kind == "data_loading" else 0.0
    rest_ms = step - waited_ms if waited_ms else 0.0
    of_workers = workers_of(judged.noted, account.share("core_taken"), waited_ms, cores_had(judged), rest_ms)
    stack, facts = stack | of_workers[0], facts | of_workers[1]
    if finding.kind == "data_loading":
        work = None if workers is None else workers.work
        batch_ms = value.each_ms if work is None else work.num_workers * step
        rows = rows_of(judged, line, work, batch_ms)
        stack, facts = stack | rows[0], facts | rows[1]
        of_line = None if line is None else source_of(line.file, judged.noted)
        if line is not None and of_line is not None and is_of_sampler(of_line.tree, line.function):
            stack |= {"own_sampler"}
    stack -= {"one_thread", "omp_thread"} if "no_core" in stack else set()
    stack |= {"dispatched"} if line is not None and is_dispatched(line, judged) else set()
    facts |= {"do": "do it", "at_line": "", "counted": "judged" if account.usual is None else "recorded"}
    facts["threads_variable"] = threads_variable(judged.noted)
    facts["more_workers"] = (filled(WORKERS_0, facts) if "workers_0" in stack else "") or "more workers"
    if line is not None:
        at = finding.facts.get("loop_lines", line.text)
        facts |= {"line": line.text, "do": f"do what {line.text} does", "at_line": f": at {at}"}
    facts["move"] = f"move work out of __getitem__ and collate_fn{facts['at_line']}"
    if line is not None and (instead := instead_of((line.entry, line.calls), finding.kind, stack)):
        facts |= {"instead": instead.set, "move": f"{instead.set}{facts['at_line']}"}
        facts["or_workers"] = OR_WORKERS if instead.makes and "no_core" not in stack else ""
    if workers is not None and workers.line is not None:
        facts |= workers.facts
    elif workers is not None:
        facts |= {"at_line": "", **workers.facts}
    reads_several = bool(calls) and calls[0].num >= SEVERAL_READS
    may_loop = line is not None and (finding.kind in (*ANEW, "pause") or op == "loss" or reads_several)
    source = source_of(line.file, judged.noted) if line is not None and may_loop else None
    if source is not None and line is not None:
        rounds = rounds_around(source.tree, line.line)
        if rounds is not None and calls_model(line, rounds.lineno, rounds.end_lineno or 0, judged):
            facts["rounds"] = f"{Path(line.file).name}:{rounds.lineno}"
        is_anew = is_called_anew(source.tree, line.line, "state_dict")
        facts |= {"anew": "state_dict()"} if is_anew else {}
        if over := goes_through(source.tree, line.line):
            facts[over] = line.text
        if over == "nested":  # what helps of one loop over entries helps of several
            facts["entries"] = line.text
        facts |= {"indexed": line.text} if indexes_alone(source.tree, line.line) else {}
    facts["in_call"] = IN_NO_CALL
    if needs_line and line is not None and (groups := makes_groups(line, judged)):
        facts |= {"groups": groups, "in_call": f"where process groups are made: {MAKES} in {groups}"}
    if issuer := issuer_of(finding, judged):
        facts |= issuer
        facts.pop("merged", None)
    of_stack = "many_groups" if finding.kind == "optimizer" and "many_groups" in stack else None
    told_by = (op, origin, issuer.get("layer"), of_stack, "any")
    keys = [str(one) for one in told_by if line is None or (one != "any" and finding.kind != "late_rank")]
    key = next((one for one in keys if one in rule.made), "")
    made = made_in(pieces_of_run(judged), key, rule.begins(key), line) if key else ""
    if length := finding.facts.get("length"):  # the number itself says more than a model that it is handed to
        begins = rule.begins("length").format(length=length.replace(",", "_?"))
        written = made_in(pieces_of_run(judged), "length", begins, line)
        key, made = ("length", written) if written else (key, made)
    if unread_of := finding.facts.get("unread_of"):  # its class says more than what the line has beside it
        made = module_made_in(unread_of, pieces_of_run(judged)) or made
    may_grow = line is not None and finding.kind in MAY_GROW and workers is None
    is_expected = bool(facts.get("registered"))
    grows = growth_text(judged.whole, line, finding.rank, is_expected) if may_grow else ""
    facts |= {"grown": ""} if grows else {}
    often = value.often or (", growing" if grows else "")
    place = in_line(line, finding)
    if made:
        place = f", {rule.made[key][0]} in {made}" + (f", used{place}" if place else "")
        facts["at_line"] = f": at {made}"
    subject = (filled(rule.subject, facts) or finding.kind) + place + often
    evidence = [*filter(None, (filled(text, facts) for text in rule.evidence)), *finding.evidence]
    # Of new workers two steps of an epoch have the loss, which is one sum.
    if value.is_rare and "in_left_out" not in finding.facts and op != "workers_new":
        evidence.append(value.text(finding.ms, finding.facts.get("in_steps")))
    if len(judged.ranks) == 1:
        evidence, subject = [of_one_rank_text(text) for text in evidence], of_one_rank_text(subject)
    is_of_trace = is_whole_trace(judged)
    if is_of_trace:
        evidence, subject = [of_trace(text) for text in evidence], of_trace(subject)
    waits = finding.facts.get("waits")
    change = next(
        change
        for change in rule.change
        if set(change.stack) <= stack | {"any"}
        and (change.waits is None or change.waits == waits)
        and (change.op is None or change.op == op)
        and (change.origin is None or change.origin == origin)
        and (change.calls is None or (line is not None and fnmatchcase(line.calls, change.calls)))
        and (change.rare is None or change.rare == value.is_rare)
        and filled(change.set, facts)
    )
    told = without_in_force(filled(change.set, facts), stack)
    if (change.is_left or told == NOTHING_LEFT) and share < LEFT_IN_FORCE:
        return None
    told += f": at {made}" if made not in told else ""
    more = MENDED_MORE if finding.kind in BY_IDLE_TIME and judged.source != "host" else MENDED_ERROR
    # What a host fills again that is behind its device in other places as well.
    is_filled = account.on_device and room.idle_ms >= LARGE_SHARE * step and finding.kind in REFILLED
    less = MENDED_LESS if (finding.kind in LESS and origin != "accumulated") or is_filled else MENDED_ERROR
    if finding.kind == "no_prefetch" and account.on_device:
        less = HIDDEN_LESS
    less, more = (math.hypot(error, finding.sample_error) for error in (less, more))
    settings = settings_text(rule.settings, judged)
    settings = settings_text(COMPILES_NOT if "torch.compile" in told else (), judged) + settings
    is_blocked = finding.kind == "launch_bound" and hides_all(rule.settings, judged)
    if finding.kind in WAITED_FOR and (finding.facts.get("host_ms") or 0.0) >= MOSTLY * finding.mean_ms:
        is_blocked = hides_all(rule.settings, judged, BLOCKING_WAITS)
    checked: CauseKind = "program_code" if "sending_ms" in finding.facts else finding.kind
    checked = "launch_bound" if is_blocked else checked
    beside_ms = 0.0
    is_seen = "seen_ms" in finding.facts  # what is done beside messages is told apart
    if finding.kind in (*OF_MESSAGES, "wide_dtype") and line is not None and line.num_samples and not is_seen:
        beside_ms = max(sampled_ms(judged, line.file, line.function) - line.ms, 0.0)
    # What ranks wait for the slowest host is in a loss of units already.
    goes_too_ms = 0.0 if finding.kind == "small_units" and account.on_device else room.more_ms
    goes_too_ms = min(goes_too_ms, finding.facts.get("rest_ms", math.inf))
    most_ms = value.ms * (1 + finding.sample_error)
    waited_ms = max(room.waited_ms, most_ms, (value.interval_ms or (0.0, 0.0))[1])
    interval, why_no_interval = value.printed(
        # No change saves more than the step that it shortens.
        min(max(room.most_ms, min(value.ms + (0.0 if is_of_kernels else finding.more_ms), step)), waited_ms),
        goes_too_ms + finding.more_ms + beside_ms,
        (less, more),
        1.0 if is_of_kernels and finding.kind == "imbalance" else finding.facts.get("least_part", 1.0),
    )
    if interval and finding.kind == "synchronisation" and sampled is not None and sampled.num_samples:
        # Or as long as the thread was seen in their line, where a device idles behind waits for it.
        interval = min(interval[0], value.ms * sampled.ms / finding.mean_ms), interval[1]
    if interval and interval[1] > finding.most_ms:
        interval = min(interval[0], value.ms), max(finding.most_ms, value.ms)
    limit: Limit | None = None
    if finding.facts.get("is_least"):
        limit, not_known = "at least", finding.facts.get("not_known", "what new memory costs")
    if finding.facts.get("is_most"):
        what = "how much slower its host is" if finding.kind == "late_rank" else "what the host leaves of it"
        limit, not_known = "at most", finding.facts.get("not_known", what)
    if limit is not None:
        interval, why_no_interval = None, f"{limit}: {not_known} is not known"
    if finding.facts.get("unbounded"):
        interval, why_no_interval = None, str(finding.facts["unbounded"])
    if workers is not None:
        evidence += workers.evidence
    elif line is not None and line.num_samples:
        evidence.append(seen_text(line))
    evidence += filter(None, (grows, waits_text(calls), issued_text(finding, judged)))
    example = finding.facts.get("example")
    rank, global_step, at_ms = finding.rank, _example_step(finding, account), None
    if example is not None:
        rank, global_step, start, end = example
        at_ms = (start, end)
    return Cause(
        kind=finding.kind,
        subject=subject,
        ms=value.ms,
        interval_ms=interval,
        why_no_interval=why_no_interval,
        limit=limit,
        bound_ms=None if interval is None else max(account.own_step_ms - interval[1], 0.0),
        share=share,
        evidence=tuple(evidence),
        change=settings.removesuffix("; ") if is_blocked else settings + told,
        check=filled(rules()[checked].check, facts) or rule.check,
        source=finding.source,
        origin=change.of or change.origin or change.op or "",
        line=line,
        rank=rank,
        is_of_trace=is_of_trace,
        is_waited_for=_is_waited_for(finding),
        global_step=global_step,
        at_ms=at_ms,
    )


def _least_share(rule: CauseRule, finding: CauseFinding, judged: Run) -> float:
    """Part of the step from which on it is named."""
    if finding.facts.get("is_proven") and rule.least_share_proven is not None:
        return rule.least_share_proven
    if rule.least_share_set is not None and settings_text(rule.settings, judged):
        return rule.least_share_set
    on_cpu = judged.source == "host"
    for name in ("moves", "op"):
        value = str(finding.facts.get(name))
        least = rule.least_share_by.get(f"{value} on CPUs") if on_cpu else None
        if (least := least or rule.least_share_by.get(value)) is not None:
            return least
    if on_cpu and rule.least_share_on_cpu is not None:
        return rule.least_share_on_cpu
    return rule.least_share


def _least_beside_host(least: float, finding: CauseFinding) -> float:
    """Of work of the device of which its host leaves a part, that is named where all of it would be."""
    device_ms = finding.facts.get("device_ms")
    if device_ms is None:
        return least
    of_part: float = least * finding.mean_ms / device_ms
    return max(of_part, min(least, LEAST_OF_HOST))


def _example_step(finding: CauseFinding, account: Account) -> int | None:
    """The step whose loss is nearest to the usual one of the steps that have it."""
    values = np.nan_to_num(finding.ms)
    if not values.any():
        return None
    usual = float(np.median(values[values > 0]))
    column = int(np.argmin(np.abs(values - usual)))
    return int(account.global_step[column])

"""Phases of a step by the host's clock, each with the line of the program that most of it is in."""

from dataclasses import dataclass, replace
from itertools import takewhile

import msgspec
import numpy as np

from aorta.account.cause import CodeLine
from aorta.account.judge.cells import account_of, is_device_busy
from aorta.account.judge.stacks import (
    FEWEST,
    MOST,
    Samples,
    behind_last_step,
    heaviest,
    is_a_loss,
    is_a_wait,
    samples_of,
    samples_of_ranks,
)
from aorta.account.judge.workers import loader_work
from aorta.account.load.rank.phases import BYTES, PHASES, PREFIX, STEP
from aorta.account.model import Run, once_of_run
from aorta.account.numbers import counted, quantity
from aorta.account.rows import positive
from aorta.records.schema import NO_CALL, NO_OPTIMIZER, StepPhase
from aorta.timeline.arrays import Flags, Floats

LEAST_SHOWN = 0.5
"""Share of the account's steps that must show their phases."""
ENOUGH = 6
"""Samples before backward passes, from which on these are divided into the model and the program's code."""
STRETCHES = 8
"""Of the run, whose medians tell growth, and the fewest steps of each."""
NEARLY_ALL = 0.9
"""Of pairs of stretches, of which the later one is longer: one in a thousand by chance."""
LEAST_GROWTH = 0.1
"""Of a step, from the first quarter of the run to the last."""
WORTH_SAYING = 0.01
"""Of the judged steps' time, from which on evaluations beside them are said."""
RUNS_BACKWARD = "_engine_run_backward"
MODULE_CALLS = ("Module._wrapped_call_impl", "Module._call_impl")
TITLES: dict[StepPhase, str] = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "logging": "after the update",
    "evaluation": "evaluation, pauses",
    "checkpoint": "checkpoint",
    "rest": "own code and the rest",
}
BEFORE = "what comes before the backward pass"
"""Forward, where that is not the model alone."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase over the judged steps, in ms of the account's step."""

    phase: StepPhase
    ms: float
    share: float
    by_rank_ms: list[float]
    num_steps: int
    """Judged steps that show their phases."""
    line: CodeLine | None
    """None where too few samples are in it, or most of them in no line of the program."""
    bytes: float | None
    """The most that was seen allocated on a device, of judged steps and ranks; None where nobody looked."""
    is_in_workers: bool = False
    """The line is what workers of a loader do while the loop waits for them."""

    @property
    def title(self) -> str:
        return TITLES[self.phase]

    @property
    def at(self) -> str:
        """'fit(), a.py:45, waiting for the device'; '' where it has no line."""
        line = self.line
        if line is None:
            return ""
        waits = ", waiting for the device" * (line.doing == "waits")
        return line.text + (", in workers" if self.is_in_workers else waits)

    @property
    def place(self) -> str:
        """', most of it in fit(), a.py:45'; '' of the line that calls backward, where all of it is."""
        is_backward = self.line is not None and self.line.calls.startswith(RUNS_BACKWARD)
        return "" if not self.at or is_backward else f", most of it in {self.at}"


def largest_text(judged: Run) -> str:
    """'The largest phase is backward: 12.2 ms of 34.9 ms (host's clock, 180 steps), most of it in a.py:45.'

    Its steps are named, since a table of cells is of those alone that were recorded. '' where phases are not
    known, or the largest one is what a library's loop does beside the passes: to launch, and to wait.
    """
    rows = phases_of(judged)
    row = max(rows, key=lambda row: row.ms, default=None)
    lines = {one.phase: one.line.text for one in rows if one.line is not None}
    is_in_loop = "rest" in lines and lines["rest"] == lines.get("forward") == lines.get("backward")
    if row is None or (row.phase == "rest" and is_in_loop):
        return ""
    step_ms = row.ms / row.share
    of_step = f"{quantity(row.ms, 'ms')} of {quantity(step_ms, 'ms')}"
    steps = f"host's clock, {counted(row.num_steps, 'step')}"
    # Samples show none of it, as it keeps the interpreter's lock. What has no room beside the phase is in it.
    collecting_ms = account_of(judged).mean_ms("garbage_collection") - (step_ms - row.ms)
    is_collecting = collecting_ms > MOST * row.ms
    is_model = row.phase != "forward" or not (is_collecting or _is_mostly_own(judged))
    title = row.title if is_model else BEFORE
    is_unseen = is_collecting and (row.phase == "forward" or not row.place)
    place = ", most of it Python's garbage collections" if is_unseen else row.place
    return f"The largest phase is {title}: {of_step} ({steps}){place}."


def evaluation_text(judged: Run) -> str:
    """'Evaluations took 0.5 s in no step, 6 times, most of it in test(), a.py:15.' '' of short ones."""
    seen = judged.noted.coverage.get("evaluations") or {}
    if not seen or not seen["s"] >= WORTH_SAYING * 1e-3 * judged.values("step_ms").mean(axis=0).sum():
        return ""
    line = line_of_evaluation(judged)
    place = "" if line is None else f", most of it in {line.text}"
    return f"Evaluations took {quantity(seen['s'], 's')} in no step, {counted(seen['times'], 'time')}{place}."


def line_of_evaluation(judged: Run) -> CodeLine | None:
    """The line of the program that calls modules in no step."""
    samples = samples_of(judged.whole, judged.ranks[0])
    if samples is None:
        return None
    which = ~samples.is_judged & samples.at("no_step") & samples.in_phase("forward", "evaluation")
    stacks = samples.chosen(which)
    for place, stack in enumerate(stacks):  # up to the first module
        frames = takewhile(lambda frame: frame.function not in MODULE_CALLS, stack.frames)
        stacks[place] = replace(stack, frames=[*frames])
    found = heaviest(stacks)
    return found if found is not None and found.num_samples >= FEWEST else None


def line_after_last_step(judged: Run) -> CodeLine | None:
    """The line of the program that most of what comes behind the last step's body is in: a trainer that
    closes, a last checkpoint."""
    samples = samples_of(judged.whole, judged.ranks[0])
    if samples is None:
        return None
    found = heaviest(samples.chosen(behind_last_step(judged, samples.rows)))
    return found if found is not None and found.num_samples >= FEWEST else None


def largest_beside_the_model(judged: Run) -> PhaseRow | None:
    """Of the phases that are not the model's own passes; None where none is known."""
    rows = [row for row in phases_of(judged) if row.phase not in ("forward", "backward")]
    return max(rows, key=lambda row: row.ms, default=None)


def phase_steps(judged: Run) -> dict[str, Floats]:
    """The step and its phases, [step]: means over ranks. {} where no step shows its phases."""
    found: dict[str, Floats] = {name: values.mean(axis=0) for name, values in _of_ranks(judged).items()}
    return _told_apart(found, _own_code(judged))


def variance_of_own_code(judged: Run) -> float:
    """Of the share of a step that samples tell apart from the forward pass, by how few they are."""
    own, steps = _own_code(judged), _of_ranks(judged)
    if own is None or "forward" not in steps:
        return 0.0
    _, _, num = _own_and_model(judged)
    before = float(steps["forward"].mean() / steps["step"].mean())
    return before**2 * own * (1 - own) / num


def growth_text(run: Run, line: CodeLine | None, rank: int | None, is_expected: bool = False) -> str:
    """'it grows: backward takes 9.2 ms in the first quarter of the run, 23 ms in the last', of the phase of a
    line, by all judged steps, recorded or not. '' where it does not grow all along the run, or the rest of
    the step does as well: as a machine slows down, all takes longer. is_expected: as the program shows,
    whatever the rest does."""
    rank = run.ranks[0] if rank not in run.ranks else rank
    phases, samples = phases_of_ranks(run, np.ones(run.num_judged, dtype=bool)), samples_of(run, rank)
    if line is None or samples is None or not phases or phases["step"].shape[1] < STRETCHES**2:
        return ""
    frames = [samples.stacks.path(int(row[5])) for row in samples.rows]
    inside = [any((one.file, one.line) == (line.file, line.line) for one in path) for path in frames]
    name = max(PHASES, key=lambda name: float(samples.ms[_which(samples, name, False) & inside].sum()))
    if name not in phases:
        return ""
    step, part = (phases[name][run.ranks.index(rank)] for name in ("step", name))
    medians, (first, second, _, last), rest = (
        np.array([np.median(one) for one in np.array_split(ms, num)])
        for ms, num in ((part, STRETCHES), (part, 4), (step - part, 4))
    )
    is_later = np.subtract.outer(medians, medians)[np.tril_indices(STRETCHES, -1)] > 0
    is_much = last - first >= LEAST_GROWTH * float(np.median(step))
    is_warm_up, is_of_all = last - second < (last - first) / 3, last * rest[0] < 2 * rest[-1] * first
    if is_warm_up or (is_of_all and not is_expected) or not is_much or is_later.mean() < NEARLY_ALL:
        return ""
    title = BEFORE if name == "forward" else TITLES[name]
    return (
        f"it grows: {title} takes {quantity(first, 'ms')} in the first quarter of the run,"
        f" {quantity(last, 'ms')} in the last"
    )


def _of_ranks(run: Run) -> dict[str, Floats]:
    """Those of the account's step, so that a phase is no part of another step than the cells are."""
    account = account_of(run)
    of_account = np.isin(run.global_step[run.judged_steps], account.global_step) | (account.usual is not None)
    return phases_of_ranks(run, of_account)


def phases_of_ranks(run: Run, of_these: Flags) -> dict[str, Floats]:
    """The step and its phases, [rank, step], of these judged steps. {} where too few of them show theirs."""
    columns = {
        phase: run.host_parts[f"{PREFIX}{phase}"][:, run.judged_steps]
        for phase in PHASES
        if f"{PREFIX}{phase}" in run.host_parts
    }
    if not columns or not run.num_judged:
        return {}
    step = run.host_parts[STEP][:, run.judged_steps]
    is_known = np.isfinite(step) & np.logical_and.reduce([np.isfinite(part) for part in columns.values()])
    is_known &= is_known.all(axis=0)  # every rank's, so that ranks are of the same steps
    chosen = is_known[0] & of_these
    if chosen.sum() < LEAST_SHOWN * of_these.sum() or not chosen.any():
        return {}
    found: dict[str, Floats] = {phase: part[:, chosen] for phase, part in columns.items()}
    whole = step[:, chosen]
    return {"step": whole, **found, "rest": whole - sum(found.values())}


@once_of_run
def phases_of(judged: Run) -> list[PhaseRow]:
    """In the order of a step; nothing where no step shows its phases. They are parts of the host's step, as
    ms of the account's: a host that runs ahead of its device takes less time for the same steps, and a reader
    needs one length of a step."""
    steps = _of_ranks(judged)
    if not steps:
        return []
    by_rank: dict[str, Floats] = {name: values.mean(axis=1) for name, values in steps.items()}
    told_ms = account_of(judged).mean_step_ms or float(by_rank["step"].mean())
    by_rank = {name: ms * told_ms / by_rank["step"].mean() for name, ms in by_rank.items()}
    by_rank["rest"] = positive(by_rank["rest"])
    step_ms = by_rank["step"]
    samples = samples_of_ranks(judged)
    own, is_busy = _own_code(judged), is_device_busy(judged)
    by_rank = _told_apart(by_rank, own)
    work = loader_work(judged)
    of_workers = work.line if work is not None and work.is_limit else None
    return [
        PhaseRow(
            phase,
            float(by_rank[phase].mean()),
            float(by_rank[phase].mean() / step_ms.mean()),
            by_rank[phase].tolist(),
            steps["step"].shape[1],
            (phase == "data" and of_workers) or _line(samples, phase, own is not None, is_busy),
            _bytes(judged, phase),
            phase == "data" and of_workers is not None,
        )
        for phase in PHASES
        if phase in by_rank and by_rank[phase].any()
    ]


def _told_apart(phases: dict[str, Floats], own: float | None) -> dict[str, Floats]:
    """With the program's own code before backward passes in the rest, by its part of what is before them."""
    if own is None or "forward" not in phases:
        return phases
    moved = own * phases["forward"]
    return phases | {"forward": phases["forward"] - moved, "rest": phases["rest"] + moved}


def _bytes(judged: Run, phase: StepPhase) -> float | None:
    values = judged.host_parts.get(f"{BYTES}{phase}", np.zeros((0, 0)))[:, judged.judged_steps]
    return float(np.nanmax(values)) if np.isfinite(values).any() else None


def _own_code(judged: Run) -> float | None:
    """Part of what lies before backward passes in which the program's own code ran and no model: a moving
    average of the weights, behind an update that ended the step. None where samples do not show that, as
    where there are no modules. A model that was counted, and is in none of them, has one sample's time."""
    own_ms, model_ms, num = _own_and_model(judged)
    if num < ENOUGH or not (model_ms > 0 or judged.noted.work is not None):
        return None
    return own_ms / (own_ms + (model_ms or own_ms / num))


@once_of_run
def _own_and_model(judged: Run) -> tuple[float, float, int]:
    """ms of the program's own code before backward passes, of the model, and of how many samples."""
    own_ms, model_ms, num = 0.0, 0.0, 0
    for one in samples_of_ranks(judged):
        in_model, in_own = _in_model(one), _in_own_code(one)
        own_ms, model_ms = own_ms + float(one.ms[in_own].sum()), model_ms + float(one.ms[in_model].sum())
        num += int(in_own.sum() + in_model.sum())
    return own_ms, model_ms, num


def _is_mostly_own(judged: Run) -> bool:
    """Whether samples before backward passes, too few to divide these, are more of the program's own code. A
    program without modules has its model there."""
    own_ms, model_ms, num = _own_and_model(judged)
    has_no_model = judged.noted.not_measured.get("flops_per_step") in (NO_CALL, NO_OPTIMIZER)
    return FEWEST <= num < ENOUGH and own_ms > model_ms and not has_no_model


def _in_model(samples: Samples) -> Flags:
    """Samples of modules, and of losses, which the loop calls as functions."""
    return samples.is_judged & (
        samples.in_phase("forward") | (_before_backward(samples) & samples.leaf_is(is_a_loss))
    )


def _in_own_code(samples: Samples) -> Flags:
    return samples.is_judged & _before_backward(samples) & ~samples.leaf_is(is_a_loss)


def _before_backward(samples: Samples) -> Flags:
    """Samples in no module, before the step's last backward pass."""
    return samples.in_phase("rest", "communication") & samples.at("body") & ~samples.is_behind


def _line(samples: list[Samples], phase: StepPhase, is_apart: bool, is_busy: bool) -> CodeLine | None:
    """is_apart: the program's own code before a backward pass counts as rest. is_busy: the device is."""
    stacks = [
        stack for one in samples for stack in one.chosen(_which(one, phase, is_apart), 1 / len(samples))
    ]
    found = heaviest(stacks)
    if found is not None and is_busy and is_a_wait(found.calls):
        found = msgspec.structs.replace(found, doing="waits")
    return found if found is not None and found.num_samples >= FEWEST else None


def _which(samples: Samples, phase: StepPhase, is_apart: bool) -> Flags:
    """Samples of a phase. Where several of a step are accumulated, code between a backward pass and the next
    forward pass counts as rest, though the spans have it as forward."""
    judged = samples.is_judged
    own = judged & samples.in_phase("rest", "communication")
    in_body = samples.at("body")
    match phase:
        case "forward" if is_apart:
            return _in_model(samples)
        case "rest" if is_apart:
            return (own & in_body & samples.is_behind) | _in_own_code(samples)
        case "forward":
            return (judged & samples.in_phase("forward")) | (own & in_body & ~samples.is_behind)
        case "rest":
            return own & in_body & samples.is_behind
        case "logging":
            return own & ~in_body
        case _:
            return judged & samples.in_phase(phase)

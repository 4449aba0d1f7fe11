"""Causes in words, and a run's account; what it reaches where there are none."""

import re
import textwrap
from collections.abc import Sequence

import numpy as np

from aorta.account.cause import Cause, CodeLine
from aorta.account.judge.alike import is_window
from aorta.account.judge.answer import loss_texts, losses, statistic_beside_step
from aorta.account.judge.cells import CELLS, LARGE_SHARE, Account, account_of, is_device_busy
from aorta.account.judge.cores import cores_had
from aorta.account.judge.kernels import kernels_by_class, kernels_by_name
from aorta.account.judge.outside import OUTSIDE_WORDS
from aorta.account.judge.phases import (
    evaluation_text,
    largest_beside_the_model,
    largest_text,
    line_after_last_step,
    phases_of,
)
from aorta.account.judge.profiles import DOING_WORDS, busiest, line_text, told_differences
from aorta.account.judge.sites import site_texts
from aorta.account.judge.stacks import MOST_RANKS, samples_of_ranks
from aorta.account.judge.timed_steps import recorded_apart
from aorta.account.load.measures import num_local_ranks, peak_text
from aorta.account.model import Causes, Dataset, Run
from aorta.account.numbers import byte_text, counted, number, percent, quantity
from aorta.records.stacks import StackFrame
from aorta.timeline.statistics import MIN_STEPS
from aorta.timeline.types import TRACE_SOURCES
from aorta.traces.classify import kernel_class
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.losses.needless import pages_beside_rows
from aorta.why.causes.losses.parts import part_of_device
from aorta.why.causes.program import program_of, settings_in_force
from aorta.why.causes.rules import rules

LARGE_LOSS = 0.15
"""Part of the step, from which on a cell is no small loss, though no cause takes it."""
FEWEST_STEPS = 3
"""Of a run that are judged: one of two may be any step, and what is between them as well."""
FEWEST_SAMPLES = 20
"""Of the thread that trains, from which on own code of the program that takes a quarter of a step would be
seen in 9 runs of 10: by three of them."""
THROUGH_MEMORY = ("elementwise", "copy")
"""Classes of kernels that take as long as their bytes, and of which fewer do where operators are joined."""
INDEXED = re.compile("index|gather|scatter|embedding")
"""Kernels of these that go where an index says, which torch.compile joins with no others."""
LARGE_THROUGH_MEMORY = 0.3
"""Part of the step, from which on these are worth a sentence, though no cause takes them."""
MANY_SOFTMAX = 8
"""Kernels of a step, in both passes: a loss has fewer."""
WORTH_NOTING = 0.02
"""Part of the step, from which on what no cause explains is said."""
LEAST_NAMED = 0.005
NOTHING = "Nothing worth changing: no single loss is large enough to name."
MOST_NAMED = 3
MOST_SITES = 6
WIDTH = 100
WORTH_A_ROW = 0.1
"""Of a cause, from which on the row of the table that it is in is said."""
ALL_OF_ROW = 0.995
OF_TRACE = (
    (r",? in \d+ of \d+ (judged|recorded) steps,?", ""),
    (r"\bms step\b", "ms trace"),
    (r"(?<= ms )(?:a|in such a|of the|each) step\b", "of the trace"),
    (r"\b(?:a|such a|the|each) step\b", "the trace"),
    (r" the trace(?= (?:take|of \d))", " in the trace"),
)
"""What rules say of a step, and what that is of a trace without steps."""
MOST_LINES = 4
"""Of a difference of stacks."""


def title(dataset: Dataset) -> str:
    """'RUN: a step takes 138 ms (mean of 60 judged steps, 2 ranks, source: host)'; of the first run, where
    there are several."""
    account = account_of(dataset.first)
    num_steps, usual = account.step_ms.shape[1], account.usual
    judged = counted(account.num_judged, f"judged {_stepper(dataset.first)}step")
    steps = (
        f"mean of {num_steps:,} of {judged}{', without the recorded ones' * bool(recorded_apart(dataset))}"
    )
    if usual is not None and usual.is_of_left_out:
        steps = f"{usual.statistic} of {len(usual.global_step):,} of {judged}, without the recorded ones"
    elif usual is not None:
        steps = f"{usual.statistic} of all {judged}"
    elif num_steps == account.num_judged:
        steps = f"mean of {judged}"
    ranks = counted(len(account.ranks), "rank")
    if not account.mean_step_ms > 0:
        source = dataset.source
        return f"{dataset.label}: the length of a step was not measured ({ranks}, source: {source})"
    if is_window(dataset):
        return (
            f"{dataset.label}: the whole trace takes {quantity(account.mean_step_ms, 'ms')}; it marks no"
            f" steps ({ranks}, source: {dataset.source})"
        )
    own = ""
    if account.share("instrument") >= LARGE_SHARE:
        own = f", {quantity(account.mean_ms('instrument'), 'ms')} of it aorta itself"
    return (
        f"{dataset.label}: a step takes {quantity(account.mean_step_ms, 'ms')}{own}"
        f" ({steps}, {ranks}, source: {dataset.source}){_recorded(account, bool(phases_of(dataset.first)))}"
    )


def _stepper(run: Run) -> str:
    """'AdamW ' where a call of this optimizer ends each step: a loop of the program may have several."""
    name = re.fullmatch(r"[\w.]*?(\w+)\.step", str(run.noted.coverage.get("steps_at", "")))
    return "" if name is None else f"{name[1]} "


def _recorded(account: Account, has_phases: bool) -> str:
    """'; its parts were measured in 21 recorded steps of 400 ms, and shortened to add up to 250 ms', where
    these are no usual ones. has_phases: of the steps that were not recorded too."""
    usual = account.usual
    if usual is None or not account.is_of_others:
        return ""
    recorded, whole = (quantity(ms, "ms") for ms in (usual.recorded_ms, usual.ms))
    if usual.recorded_ms > usual.ms:
        rest = f"shortened to add up to {whole}"
    elif has_phases:
        rest = f"of the rest of the {whole} only the host's phases are known"
    else:
        rest = f"the rest of the {whole} is not known"
    num = account.step_ms.shape[1]
    return f"; its parts were measured in {num:,} recorded steps of {recorded}, and {rest}"


def causes_text(causes: Causes, run: Run) -> str:
    """The step, then its causes with evidence, change and check."""
    lines = [causes.title]
    for text in run.story:
        lines += wrapped(text)
    lines += cause_lines(causes.listed)
    for note in (*([] if causes.listed else [causes.empty_text]), *causes.notes):
        lines += ["", *textwrap.wrap(note, WIDTH)]
    for difference in told_differences(run, causes.late_rank):
        lines += ["", f"Sampled, ms of a step: {difference.title}."]
        for line in difference.lines[:MOST_LINES]:
            lines += wrapped(line_text(line))
    if busy := busiest(run, MOST_LINES):
        lines += ["", "Sampled, ms of a step: where the training thread is most."]
        for line in busy:
            lines += wrapped(line_text(line, is_difference=False))
    if sites := site_texts(run):
        lines += ["", "Collectives of a rank by the line that issues them, those that move most first."]
        for text in sites[:MOST_SITES]:
            lines += wrapped(text)
    return "\n".join(lines)


def notes(causes: Causes, run: Run) -> list[str]:
    """What cannot be told, settings that slow communication down, the largest phase, evaluations, new pages,
    what no cause explains, what is in no step."""
    account = account_of(run)
    unexplained = _unexplained_text(causes, account.mean_step_ms) if causes.listed else ""
    texts = (
        *(_settings_text(causes, run), largest_text(run), evaluation_text(run), _pages_text(causes, run)),
        *(unexplained, _outside_text(account, run)),
    )
    return [*causes.cannot_tell, *causes.no_loss, *(text for text in texts if text)]


def _pages_text(causes: Causes, run: Run) -> str:
    """New pages of memory that cannot be told to be of operators' results, whoever asks for them."""
    pages = pages_beside_rows(run, account_of(run))
    if pages is None or pages.part < LARGE_SHARE or any(one.origin == "pages" for one in causes.listed):
        return ""
    remedy = next(change.set for change in rules()["compute"].change if change.op == "pages")
    return (
        f"The thread that trains takes {pages.faults:,.0f} new pages of memory a step, for which the system"
        f" has {quantity(pages.ms, 'ms')} of its CPU time, whatever they are for: {remedy}."
    )


def _settings_text(causes: Causes, run: Run) -> str:
    """Settings that slow communication down, which no cause names, with the rate that it reaches."""
    account, told = account_of(run), " ".join(cause.change for cause in causes.listed)
    settings = settings_in_force(rules()["transfer"].settings, run)
    texts = [
        f"{one.text} is in the environment{one.at}: {one.effect}." for one in settings if one.text not in told
    ]
    if not texts or account.comm_ms < WORTH_NOTING * account.mean_step_ms:
        return ""
    fastest = max(run.collective_rows, key=lambda row: row.busbw_gb_s or 0.0, default=None)
    if fastest is not None and fastest.busbw_gb_s:
        part, num = part_of_device(run), fastest.num_ranks or len(run.ranks)
        rate = f"Calls of {fastest.op} move at up to {number(fastest.busbw_gb_s)} GB/s"
        if part is not None and num <= min(num_local_ranks(run.noted), part.scale_up.domain_size):
            rate += f"; the links of {part.title} carry {part.scale_up.gpu_bytes_per_s / 1e9:.0f}"
        texts.append(f"{rate}.")
    texts.append("What that costs was not measured: try without, where nothing needs it.")
    return " ".join(texts)


def _unexplained_text(causes: Causes, step: float) -> str:
    total = sum(causes.unexplained_ms.values())
    if total < WORTH_NOTING * step:
        return ""
    largest = list(causes.unexplained_ms.items())[:MOST_NAMED]
    named = {CELLS[name].title: ms for name, ms in largest if ms >= LEAST_NAMED * step}
    parts = ", ".join(f"{title} {number(ms)}" for title, ms in named.items())
    more = "; the rest is in smaller parts" if total - sum(named.values()) >= LEAST_NAMED * step else ""
    a_step = "" if causes.listed[0].is_of_trace else " a step"
    return f"Not explained by these: {quantity(total, 'ms')}{a_step} without compute ({parts}{more})."


def _outside_text(account: Account, judged: Run) -> str:
    wall = account.wall_ms
    outside = {name: ms for name, ms in account.outside.items() if name in OUTSIDE_WORDS}
    if not wall > 0 or sum(outside.values()) < LARGE_SHARE * wall:
        return ""
    unit, size = ("ms", 1.0) if wall < 1e3 else ("s", 1e3)
    words, after = dict(OUTSIDE_WORDS), line_after_last_step(judged)
    if after is not None:
        words["after"] += f" (most of it in {after.text}" + (f", in {after.calls})" if after.calls else ")")
    parts = [
        f"{quantity(ms / size, unit)} {words[name]}"
        for name, ms in outside.items()
        if ms >= WORTH_NOTING * wall
    ]
    whole = "the trace covers" if "unmarked" in account.outside else "the run took"
    return (
        f"Outside of the judged steps: {quantity(sum(outside.values()) / size, unit)} of the"
        f" {quantity(wall / size, unit)} that {whole}: {', '.join(parts)}."
    )


def _reason_text(cell: str, dataset: Dataset, account: Account) -> str:
    num, num_steps = sum(row.count for row in kernels_by_class(dataset)), account.step_ms.shape[1]
    if num_steps < MIN_STEPS:
        few = f"{counted(num_steps, 'judged step')} are too few to tell it from chance"
        return f"Its reason is not certain: {few}."
    is_of_launches = cell == "wait" and _is_of_launches(account)
    if not num or (cell != "launch" and not is_of_launches):
        return "Its reason is not certain."
    in_turn = "Most of it is for a rank whose device runs dry meanwhile, for one after the other. "
    compiled = "compile" in program_of(dataset.first.noted)[0]
    remedy = "Larger batches" if compiled else "torch.compile launches less and larger batches"
    return (in_turn if is_of_launches else "") + (
        f"The host bounds the step: {num:,.0f} kernels and copies, whose launches alone explain little of it;"
        f" the rest is Python, wrappers and casts around them. {remedy} hide what does not grow with them."
    )


def _is_of_launches(account: Account) -> bool:
    """Whether half of what ranks wait is for one whose host launches late: of what the others wait for it, no
    more than its device runs dry."""
    exposed, launch = account.exposed, account.cells.get("launch")
    if exposed is None or launch is None:
        return False
    late_ms = np.minimum(exposed.caused_ms, launch).mean(axis=0) * (len(account.ranks) - 1)
    return bool(late_ms.mean() >= exposed.wait_ms.mean() / 2 > 0)


def _through_memory_text(dataset: Dataset, account: Account) -> str:
    """What kernels take that memory bounds, and where they are; '' of little."""
    rows = [row for row in kernels_by_class(dataset) if row.name in THROUGH_MEMORY]
    ms = sum(row.time_ms for row in rows)
    if not ms >= LARGE_THROUGH_MEMORY * account.recorded_ms > 0:
        return ""
    work = dataset.first.noted.work
    lines = [] if work is None else work.lines
    parts = [f"{row.name} {number(row.time_ms)}" for row in rows]
    named = [row for row in kernels_by_name(dataset) if kernel_class(row.name) in THROUGH_MEMORY]
    parts += [f"the longest is {row.title}" for row in named[:1]]
    indexed_ms = sum(row.time_ms for row in named if INDEXED.search(row.name.lower()))
    where = "which lines they are of was not counted; a trace of torch.profiler with stacks tells it"
    softmax = sum(row.count for row in kernels_by_name(dataset) if "softmax" in row.name.lower())
    is_fused = any(row.name == "attention" for row in kernels_by_class(dataset))
    if softmax >= MANY_SOFTMAX and not is_fused and not lines:
        where += (
            f"; softmax runs {softmax:,.0f} times a step and no kernel of fused attention does, so that"
            " attention may be computed eagerly (instead: scaled_dot_product_attention; of transformers'"
            ' models attn_implementation="sdpa")'
        )
    if lines:
        most = max(lines, key=lambda line: line.bytes)
        where = f"of the model's lines {most.at.text} moves most, counted on a copy without data"
    are_joined = "compile" in program_of(dataset.first.noted)[0] or 2 * indexed_ms > ms
    joins = "" if are_joined else "; torch.compile joins those of one function"
    step = "the step" if account.usual is None else f"the {quantity(account.recorded_ms, 'ms')} recorded step"
    return (
        f" Kernels that memory bounds take {quantity(ms, 'ms')} of {step},"
        f" {percent(ms / account.recorded_ms)} ({', '.join(parts)}): {where}{joins}."
    )


def nothing_text(dataset: Dataset, causes: Causes) -> str:
    """That nothing is worth changing, or none can be told, with what the step does reach, as far as known."""
    account = account_of(dataset.first)
    largest = max(causes.unexplained_ms, key=lambda name: causes.unexplained_ms[name], default="")
    is_large = bool(largest) and account.share(largest) >= LARGE_LOSS
    is_lossy = any((loss.share or 0.0) >= LARGE_LOSS for loss in losses(dataset))
    # A host that is ahead of a busy device loses nothing, whatever it does meanwhile.
    phase = None if is_device_busy(dataset.first) else largest_beside_the_model(dataset.first)
    is_large_phase = phase is not None and phase.share >= LARGE_LOSS
    through_memory = _through_memory_text(dataset, account)
    are_few = account.step_ms.shape[1] < FEWEST_STEPS and dataset.source not in TRACE_SOURCES
    num_samples = _fewest_samples(dataset.first.whole)
    is_nothing = (
        account.is_measured
        and not causes.leaves_cores
        and not are_few
        and num_samples >= FEWEST_SAMPLES
        and not (causes.cannot_tell or causes.no_loss)
        and not (is_large or is_lossy or is_large_phase or through_memory)
        and not _settings_text(causes, dataset.first)
        and not _pages_text(causes, dataset.first)
    )
    text = NOTHING if is_nothing else "No cause is named."
    lost = "; ".join(loss_texts(dataset, "the trace" if is_window(dataset) else "a step")).removesuffix(".")
    if lost:
        text += f" {lost[0].upper()}{lost[1:]}."
    if num_samples < FEWEST_SAMPLES:
        few = f"{counted(num_samples, 'sample')} of the training thread cannot tell"
        none = "No sample of the training thread in these steps tells"
        text += f" {few if num_samples else none} what the program's own code takes: record more steps."
    # What no rule knows may be in the line that takes most; a backward pass shows none of the model's.
    lines = [] if is_nothing or account.on_device else busiest(dataset.first, MOST_LINES)
    top = next((line for line in lines if line.doing == "runs" and "backward" not in line.calls), None)
    if top and top.ms >= LARGE_LOSS * account.mean_step_ms:
        most = f"{top.text} takes most, {quantity(top.ms, 'ms')}"
        text += f" Backward passes aside, {most}: no loss of it is known."
    if is_large:
        text += (
            f" The largest part without compute is {CELLS[largest].title},"
            f" {quantity(account.mean_ms(largest), 'ms')} of the step, {percent(account.share(largest))}:"
            f" {CELLS[largest].meaning}. {_reason_text(largest, dataset, account)}"
        )
    text += through_memory
    # The largest one of all has a sentence of its own (notes).
    if phase is not None and is_large_phase and phase.ms < max(row.ms for row in phases_of(dataset.first)):
        share = percent(phase.share)
        text += f" Beside forward and backward, {phase.title} takes {share} of the step{phase.place}."
    mfu, rate = (statistic_beside_step(dataset, name) for name in ("mfu", "model_tflops_per_gpu"))
    if mfu is not None and mfu.median is not None and rate is not None:
        text += (
            f" Roofline: {number(rate.median)} TFLOP/s per GPU, {percent(mfu.median)} of"
            f" {peak_text(dataset.first.noted)}; the rest is in the kernels."
        )
    elif account.on_device:
        reasons = dataset.first.not_measured
        text += f" MFU is not known: {reasons.get('mfu', 'FLOPs or the peak are not in run.json')}."
    return text


def _fewest_samples(run: Run) -> int:
    """In judged steps, of a rank that stands for all; FEWEST_SAMPLES where nobody sampled."""
    samples = samples_of_ranks(run)
    if not samples and run.stacks is not None and run.source not in TRACE_SOURCES:
        return 0 if any(len(run.stacks(rank).columns) for rank in run.ranks[:MOST_RANKS]) else FEWEST_SAMPLES
    return min((int(one.is_judged.sum()) for one in samples), default=FEWEST_SAMPLES)


# ---- a cause --------------------------------------------------------------------------------------------


def cause_lines(causes: Sequence[Cause]) -> list[str]:
    """Each cause under its number: headline, evidence, place, change and check."""
    lines: list[str] = []
    for place, cause in enumerate(causes, start=1):
        lines += ["", f"{place}. {cause.headline}"]
        for name, text in (
            *(("", sentence) for sentence in cause.evidence),
            ("look at", cause.place),
            ("change", cause.change),
            ("check", cause.check),
        ):
            if text:
                lines += wrapped(f"{name}: {text}" if name else text)
    return lines


def seen_text(line: CodeLine) -> str:
    """'94 % of it was sampled in augment(), train.py:5, 61 % in this line, 33 % in :7 (31 samples; the thread
    sleeps in sleep of time), called from ...'."""
    calls = f" in {line.calls}" if line.calls else ""
    caller = f", called from {line.caller}" if line.caller else ""
    others = [f"{percent(line.part * part)} in :{at}" for at, part in line.lines if at != line.line]
    own = dict(line.lines).get(line.line, 1.0)
    among = "".join(f", {part}" for part in [f"{percent(line.part * own)} in this line", *others] if others)
    num = counted(line.num_samples, "sample")
    return (
        f"{percent(line.part)} of it was sampled in {line.text}{among} ({num}; the thread"
        f" {DOING_WORDS[line.doing]}{calls}){caller}"
    )


def wrapped(text: str) -> list[str]:
    """Lines of a paragraph below a cause, indented."""
    return textwrap.wrap(
        text, WIDTH, initial_indent="   ", subsequent_indent="     ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def rows_text(taken: dict[str, float], account: Account) -> str:
    """'of the mean rank, 4.1 ms of it are waiting for ranks and 4.0 ms launches', of what is in several rows
    of the table, or is a part of one; '' where it is one."""
    total = sum(taken.values())
    rows = [(name, ms) for name, ms in taken.items() if ms >= WORTH_A_ROW * total > 0]
    if not rows or (len(rows) == 1 and rows[0][1] >= (1 - WORTH_A_ROW) * account.mean_ms(rows[0][0])):
        return ""
    texts = []
    for name, ms in rows:
        row_ms = account.mean_ms(name)
        of_row = "all" if ms >= ALL_OF_ROW * row_ms else f"{quantity(ms, 'ms')} of the"
        texts.append(f"{of_row} {quantity(row_ms, 'ms')} of {CELLS[name].title}")
    small_ms = total - sum(ms for _, ms in rows)
    if small_ms > 0 and quantity(total - small_ms, "ms") != quantity(total, "ms"):
        texts.append(f"{quantity(small_ms, 'ms')} of other rows")
    return f"in the table it is {', '.join(texts[:-1])}{' and ' if len(texts) > 1 else ''}{texts[-1]}"


def in_line(line: CodeLine | None, finding: CauseFinding) -> str:
    """' in augment(), train.py:5'"""
    if finding.facts.get("op") == "starved":
        return ", which lacks cores"
    if line is None:
        return ""
    if finding.kind != "late_rank":
        return f" in {line.text}"
    return f", which {'sleeps' if line.doing == 'sleeps' else 'is'} in {line.text}"


def of_one_rank_text(text: str) -> str:
    """A sentence on a run of one rank, which needs not be said."""
    return text.replace(" on the rank", "")


def of_trace(text: str) -> str:
    """A sentence on a step, of a trace that marks none and counts as one."""
    for words, instead in OF_TRACE:
        text = re.sub(words, instead, text)
    return text


def fact_texts(finding: CauseFinding, judged: Run, account: Account, path: str) -> dict[str, str]:
    """Facts as they are printed; what is not known is absent. Parts of recorded steps that are shorter than
    usual ones are as they were, and so is the step that they are said to be of."""
    more_ms = account.mean_ms("unrecorded") if account.is_of_others else 0.0
    step_ms = quantity(finding.facts.get("step_ms", account.mean_step_ms) - more_ms, "ms")
    step_ms += " recorded" if more_ms > 0 else ""
    texts = {"path": path, "step_ms": step_ms, "others": "others"}
    texts["who"] = "all ranks" if len(judged.ranks) > 1 else "the rank"
    texts["whose"] = "of other programs or of the ranks themselves (gloo's, a loader's)"
    if finding.kind == "core_taken" and (had := cores_had(judged)):
        by_whom = f"{number(had.ranks)} and other processes {number(had.others)}"
        texts["whose"] = f"{texts['whose']}; of {counted(had.num, 'core')} the ranks had {by_whom}"
    for name, value in finding.facts.items():
        if isinstance(value, str):
            texts[name] = value
        elif name == "step_ms" or value is None or isinstance(value, (bool, tuple, StackFrame, CodeLine)):
            continue
        elif name == "bytes" or name.endswith("_bytes"):
            texts[name] = byte_text(value)
        elif isinstance(value, int):
            texts[name] = f"{value:,}"
        elif not np.isfinite(value):
            continue
        elif name.endswith("_ms"):
            texts[name] = quantity(value, "ms")
        elif name in ("hidden", "part"):
            texts[name] = percent(value)
        elif name in ("count", "merged", "num_retries", "num_frees"):
            texts[name] = f"{value:,.0f}"
        else:
            texts[name] = number(value)
    texts["each"] = f" of {texts['bytes']} each" if finding.facts.get("bytes") else ""
    return texts


def filled(template: str, facts: dict[str, str]) -> str:
    """'' where a fact is not known."""
    try:
        return template.format_map(facts)
    except KeyError:
        return ""

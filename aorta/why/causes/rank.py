"""From findings to causes: how much each is worth, with an interval; the largest first."""

import msgspec
import numpy as np

from aorta.account.model import Dataset, JudgedRun, Lead
from aorta.account.numbers import byte_text, number, percent, quantity
from aorta.why.causes.cause import Cause
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.losses.of_a_step import findings
from aorta.why.causes.rules import CauseRule, rules
from aorta.why.causes.selection import last_steps
from aorta.why.causes.stack import stack_of
from aorta.why.causes.worth import worth

MOST_SHOWN = 5
FEW_STEPS_FACTOR = 2
"""Where the steps are too few for an interval, a loss must be this much larger."""


def causes(judged: JudgedRun, lead: Lead = "raw", path: str = "RUN") -> list[Cause]:
    """The causes of a run worth a word, the largest first; at most MOST_SHOWN. path: for the commands.

    Of a run of many ranks and steps the last steps alone (last_steps), which the evidence then says.
    """
    num_steps, judged = judged.num_steps, last_steps(judged)
    step = float(np.nanmedian(judged.values("step_ms"))) if judged.num_steps else 0.0
    if not step > 0 or judged.run.source == "projected":  # a model waits for nobody, and knows its losses
        return []
    rule_of = rules()
    stack = stack_of(judged)
    named_causes = []
    for finding in findings(judged, lead):
        rule = rule_of.get(finding.kind)
        if rule is not None:
            cause = cause_of(finding, rule, judged, step, stack, path)
            if cause is not None:
                named_causes.append(cause)
    if judged.num_steps < num_steps:
        part = f"judged from the last {judged.num_steps:,} of {num_steps:,} steps"
        named_causes = [
            msgspec.structs.replace(cause, evidence=(*cause.evidence, part)) for cause in named_causes
        ]
    return sorted(named_causes, key=lambda cause: -cause.ms)[:MOST_SHOWN]


def causes_of(dataset: Dataset, path: str | None = None) -> list[Cause]:
    """Of the first run, where there are several."""
    judged = dataset.first
    return causes(judged, dataset.lead, path or str(judged.run.path))


def cause_of(
    finding: CauseFinding, rule: CauseRule, judged: JudgedRun, step: float, stack: frozenset[str], path: str
) -> Cause | None:
    """None where the loss is too small, or chance."""
    value = worth(finding, rule, judged.run.global_step[judged.num_warmup :])
    median_step = step
    if value.is_mean:
        step = float(np.nanmean(judged.values("step_ms")))
    share = value.ms / step
    if not finding.is_risk:
        least = _least_share(rule, finding, judged) * (
            1 if value.interval_ms is not None else FEW_STEPS_FACTOR
        )
        if share < least or (rule.needs_interval and not value.is_sure(finding.ms, least * step)):
            return None
    facts = _texts(finding, judged, step, path)
    evidence = [*filter(None, (_filled(text, facts) for text in rule.evidence)), *finding.evidence]
    if value.is_mean:
        evidence.append(value.text(finding.ms, step, median_step))
    waits = finding.facts.get("waits")
    change = next(
        change
        for change in rule.change
        if set(change.stack) <= stack | {"any"}
        and (change.waits is None or change.waits == waits)
        and (change.op is None or change.op == finding.facts.get("op"))
    )
    interval = value.interval_ms
    example = finding.facts.get("example")
    rank, global_step, at_ms = finding.rank, _example_step(finding, judged), None
    if example is not None:
        rank, global_step, start, end = example
        at_ms = (start, end)
    return Cause(
        kind=finding.kind,
        subject=(_filled(rule.subject, facts) or finding.kind) + value.often,
        ms=value.ms,
        interval_ms=None if interval is None else (max(interval[0], 0.0), interval[1]),
        why_no_interval=value.why_no_interval,
        bound_ms=max(step - value.ms, 0.0),
        share=share,
        evidence=tuple(evidence),
        change=_filled(change.set, facts) or change.set,
        check=_filled(rule.check, facts) or rule.check,
        source=finding.source,
        rank=rank,
        global_step=global_step,
        at_ms=at_ms,
    )


def _least_share(rule: CauseRule, finding: CauseFinding, judged: JudgedRun) -> float:
    """Part of the step from which on it is named."""
    by_op = rule.least_share_by_op.get(str(finding.facts.get("op")))
    if by_op is not None:
        return by_op
    if judged.run.source == "host" and rule.least_share_on_cpu is not None:
        return rule.least_share_on_cpu
    return rule.least_share


def _example_step(finding: CauseFinding, judged: JudgedRun) -> int | None:
    """The step whose loss is nearest to the usual one of the steps that have it."""
    values = np.nan_to_num(finding.ms)
    if not values.any():
        return None
    usual = float(np.median(values[values > 0]))
    column = int(np.argmin(np.abs(values - usual)))
    return int(judged.run.global_step[judged.num_warmup + column])


def _texts(finding: CauseFinding, judged: JudgedRun, step: float, path: str) -> dict[str, str]:
    """Facts as they are printed; what is not known is absent."""
    texts = {"path": path, "step_ms": quantity(step, "ms"), "num_ranks": str(len(judged.run.ranks))}
    for name, value in finding.facts.items():
        if isinstance(value, str):
            texts[name] = value
        elif isinstance(value, bool) or value is None or isinstance(value, tuple):
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
        elif name in ("count", "merged", "num_retries"):
            texts[name] = f"{value:,.0f}"
        else:
            texts[name] = number(value)
    return texts


def _filled(template: str, facts: dict[str, str]) -> str:
    """'' where a fact is not known."""
    try:
        return template.format_map(facts)
    except KeyError:
        return ""

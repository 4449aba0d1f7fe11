"""The gate: limits on metrics, and whether runs keep them. For CI, hence the exit status.

    exposed_ms:    {max: 12.0}
    overlap_ratio: {min: 0.6}
    step_ms:       {max_ratio: 1.02, runs: 3}       # against the reference, of at least 3 runs on each side
    runs: 2        # of every other limit; 1 where left out

A limit is met when the whole 95 % interval keeps it, violated when all of it breaks it, and cannot be
judged in between: then the runs are too noisy, or too short, for this limit. The interval of a ratio of
single runs holds what runs of one job differ by.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from aorta.account.judge.alike import estimates
from aorta.account.judge.judged import bandwidths, why_missing
from aorta.account.metrics import MEANINGS, meaning, metric_key
from aorta.account.model import ConfidenceInterval, Dataset, MetricComparison, Report
from aorta.account.numbers import number
from aorta.config.yaml_files import read_yaml
from aorta.errors import EXIT_CODES, ConfigError, did_you_mean
from aorta.timeline.statistics import LEVEL, MIN_STEPS, side

State = Literal["met", "violated", "not judged"]
KINDS = ("max", "min", "max_ratio", "min_ratio")
RUNS = "runs"
"""How many runs a limit needs of each side, beside its bounds, or for all limits at the top."""
STATES: tuple[State, ...] = ("met", "violated", "not judged")
MOST_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class Limit:
    metric: str
    kind: Literal["max", "min", "max_ratio", "min_ratio"]
    bound: float
    runs: int = 1
    """Of each side that it looks at, fewer of which cannot be judged."""

    @property
    def is_ratio(self) -> bool:
        return self.kind.endswith("_ratio")

    @property
    def text(self) -> str:
        """'step_ms max_ratio 1.02'"""
        return f"{self.metric} {self.kind} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A limit and what the run did."""

    limit: Limit
    label: str
    value: float | None
    interval: ConfidenceInterval | None
    state: State
    reason: str
    """'' unless it cannot be judged."""
    numbers: str = ""
    """What an absolute bandwidth is over."""

    @property
    def text(self) -> str:
        unit = "" if self.limit.is_ratio else meaning(self.limit.metric).unit
        text = number(self.value, extra_digits=1) + (f" {unit}" if unit and self.value is not None else "")
        if self.interval is not None:
            low, high = (number(x, extra_digits=1) for x in (self.interval.low, self.interval.high))
            text += f" [{low}, {high}]"
        if self.numbers:
            text += f", {self.numbers}"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.state}: {self.label}: {self.limit.text}: {text}{reason}"


@dataclass(frozen=True, slots=True)
class Gate:
    checked: list[LimitCheck]

    @property
    def state(self) -> State:
        """One violated limit is enough; one that cannot be judged keeps the rest from being met."""
        states: tuple[State, ...] = ("violated", "not judged")
        return next((s for s in states if any(check.state == s for check in self.checked)), "met")

    @property
    def exit_status(self) -> int:
        return EXIT_CODES[self.state]

    @property
    def text(self) -> str:
        """The answer, then every limit that is not met."""
        counts = {s: sum(check.state == s for check in self.checked) for s in STATES}
        met_text = f"{counts['met']} of {len(self.checked)} limits met"
        unmet_texts = [f"{num} {state}" for state, num in counts.items() if num and state != "met"]
        lines = [f"budget {self.state}: {', '.join([met_text, *unmet_texts])}"]
        return "\n".join(lines + [check.text for check in self.checked if check.state != "met"])


def load_budget(path: Path | str) -> list[Limit]:
    """The limits of a YAML file; ConfigError in one line where it is not one."""
    content = read_yaml(path, f"--budget {path}", aliases=False)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--budget {path}: must hold limits such as 'exposed_ms: {{max: 12.0}}'")
    num_runs = _runs(path, RUNS, content.pop(RUNS, 1))
    if not content:
        raise ConfigError(f"--budget {path}: must hold limits such as 'exposed_ms: {{max: 12.0}}'")
    return [limit for name, value in content.items() for limit in _limits(path, name, value, num_runs)]


def _runs(path: Path | str, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_RUNS:
        raise ConfigError(f"--budget {path}: {name} must be a whole number from 1, got {value!r}")
    return value


def _limits(path: Path | str, name: Any, value: Any, num_runs: int) -> Iterable[Limit]:
    if not isinstance(name, str):
        raise ConfigError(f"--budget {path}: {name!r} is not a metric")
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"--budget {path}: {name} needs limits such as {{max: 12.0}}, got {value!r}")
    bounds = dict(value)
    num_runs = _runs(path, f"{name}.{RUNS}", bounds.pop(RUNS, num_runs))
    if not bounds:
        raise ConfigError(f"--budget {path}: {name} needs limits such as {{max: 12.0}}, got {value!r}")
    for kind, bound in bounds.items():
        if kind not in KINDS:
            raise ConfigError(f"--budget {path}: {name}.{kind} is not a limit{_near(str(kind), KINDS)}")
        if isinstance(bound, int) and abs(bound) >= 2**63:
            raise ConfigError(f"--budget {path}: {name}.{kind} must be below 2**63 in size")
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise ConfigError(f"--budget {path}: {name}.{kind} must be a number, got {bound!r}")
        yield Limit(name, kind, float(bound), num_runs)


def check_budget(limits: list[Limit], report: Report) -> Gate:
    """Absolute limits of the candidate, or of every run where nothing is compared; ratios against the
    reference. ConfigError for a metric that no run knows."""
    known_metrics = dict.fromkeys(
        name for shown_dataset in report.datasets.values() for name in shown_dataset.statistics
    )
    for limit in limits:
        name = limit.metric
        if name not in known_metrics and metric_key(name).name not in MEANINGS:
            raise ConfigError(f"--budget: {limit.metric} is not a metric{_near(limit.metric, known_metrics)}")
        if limit.is_ratio and report.comparison is None:
            raise ConfigError(f"--budget: {limit.text} needs a reference to compare against")
    sides = [report.candidate] if report.candidate is not None else list(report.datasets.values())
    checked = []
    for limit in limits:
        if limit.is_ratio and report.comparison is not None:
            compared_metric = report.comparison.metrics.get(limit.metric)
            compared = [*filter(None, (report.reference, report.candidate))]
            of_ratio = _check_ratio(limit, report.comparison.candidate, compared_metric)
            checked.append(_enough(of_ratio, compared))
        else:
            checked += [_enough(_check_absolute(limit, dataset), [dataset]) for dataset in sides]
    return Gate(checked)


def _enough(checked: LimitCheck, sides: Iterable[Dataset]) -> LimitCheck:
    """The check, not judged where a side has fewer runs than the limit needs."""
    few = [
        f"{dataset.label} has {len(dataset.runs)}"
        for dataset in sides
        if len(dataset.runs) < checked.limit.runs
    ]
    if not few:
        return checked
    return replace(checked, state="not judged", reason=f"needs {checked.limit.runs} runs: {', '.join(few)}")


def _check_ratio(limit: Limit, label: str, row: MetricComparison | None) -> LimitCheck:
    if row is None or row.ratio is None or row.interval is None:
        value = None if row is None else row.ratio
        reason = row.reason if row is not None and row.reason else "not measured on both sides"
        return LimitCheck(limit, label, value, None, "not judged", reason)
    return _judge(limit, label, row.ratio, row.interval)


def _check_absolute(limit: Limit, dataset: Dataset) -> LimitCheck:
    name, numbers = limit.metric, ""
    for over in bandwidths(dataset.runs, name):
        numbers = f"over the {over}"
    statistic = dataset.statistics.get(name)
    if statistic is None or statistic.median is None:
        reason = why_missing(dataset, name)
        return LimitCheck(limit, dataset.label, None, None, "not judged", f"not measured: {reason}")
    runs = estimates(dataset, name)
    if runs is None:
        reason = f"too few steps to know the noise, {MIN_STEPS} judged ones are needed in each run"
        return LimitCheck(limit, dataset.label, statistic.median, None, "not judged", reason, numbers)
    return _judge(limit, dataset.label, statistic.median, ConfidenceInterval(*side(runs)[1]), numbers)


def _judge(
    limit: Limit, label: str, value: float, interval: ConfidenceInterval, numbers: str = ""
) -> LimitCheck:
    upper = limit.kind.startswith("max")
    keeps = interval.high <= limit.bound if upper else interval.low >= limit.bound
    breaks = interval.low > limit.bound if upper else interval.high < limit.bound
    state: State = "met" if keeps else "violated" if breaks else "not judged"
    reason = "too noisy: the interval holds the limit" if state == "not judged" else ""
    return LimitCheck(limit, label, value, interval, state, reason, numbers)


def junit_xml(gate: Gate) -> bytes:
    """One test case a limit: a failure where it is violated, an error where it cannot be judged."""
    num = {state: str(sum(check.state == state for check in gate.checked)) for state in STATES}
    counts = {"tests": str(len(gate.checked)), "failures": num["violated"], "errors": num["not judged"]}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "aorta budget", **counts})
    for check in gate.checked:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"budget.{_xml(check.label)}", "name": _xml(check.limit.text)}
        )
        if check.state != "met":
            tag = "failure" if check.state == "violated" else "error"
            ElementTree.SubElement(case, tag, {"message": _xml(check.text)}).text = _xml(check.text)
    data: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def markdown(report: Report, gate: Gate | None) -> str:
    """A summary for a pull request or a job page."""
    lines: list[str] = []
    if gate is not None:
        lines += [f"### Budget {gate.state}", "", f"| | run | limit | measured | {LEVEL} interval |"]
        lines += ["|---|---|---|---:|---|"]
        for check in gate.checked:
            value = number(check.value, extra_digits=1) + (f", {check.numbers}" if check.numbers else "")
            interval = check.interval
            bounds = (
                ""
                if interval is None
                else f"{number(interval.low, extra_digits=1)} to {number(interval.high, extra_digits=1)}"
            )
            cells = [
                f"**{check.state}**" if check.state != "met" else check.state,
                check.label,
                check.limit.text,
                value,
            ]
            lines.append(
                _table_row([*cells, bounds if not check.reason else f"{bounds} {check.reason}".strip()])
            )
        lines.append("")
    if report.comparison is not None:
        comparison = report.comparison
        lines += [f"### {_cell(comparison.headline)}", ""]
        lines.append(
            _table_row(
                ["", comparison.reference, comparison.candidate, "ratio", f"{LEVEL} interval", "verdict"]
            )
        )
        lines.append("|---|---:|---:|---:|---|---|")
        for metric in comparison.metrics.values():
            if metric.p_adjusted is None and metric.name not in (comparison.main, "step_ms", "exposed_ms"):
                continue
            numbers = [number(v, extra_digits=1) for v in (metric.reference, metric.candidate, metric.ratio)]
            interval = metric.interval
            words = "" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"
            name = metric.name
            lines.append(_table_row([name, *numbers, words, metric.verdict]))
        lines += ["", _cell(comparison.scope) + ".", ""]
        if comparison.differences:
            lines += ["Configured differently:", ""]
            lines.append(_table_row(["", comparison.reference, comparison.candidate]))
            lines.append("|---|---|---|")
            for one_setting in comparison.differences[:20]:
                sides = [one_setting.reference or "not set", one_setting.candidate or "not set"]
                lines.append(_table_row([f"{one_setting.group}: {one_setting.name}", *sides]))
            lines.append("")
    return "\n".join(lines)


def _table_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    """Escapes a text, whatever it holds: labels and settings are not markup."""
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(mark, entity)
    return _xml(" ".join(text.split()).replace("[", "&#91;").replace("]", "&#93;"))


def _xml(text: str) -> str:
    """XML cannot hold control characters, not even escaped."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _near(name: str, candidates: Iterable[str]) -> str:
    names = list(candidates)
    return did_you_mean(name, names, f"; there is {', '.join(names[:12])}")

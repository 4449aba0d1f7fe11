"""Reads what is said of a run from outside, and what of it cannot be; whether all outputs say the same."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np

from aorta.account.judge.cells import account_of
from aorta.account.model import Causes, Report
from aorta.page.html import page
from aorta.page.table import dataset_table
from aorta.page.write import make_report
from aorta.timeline.types import TRACE_SOURCES
from aorta.why.causes.rank import causes_of
from aorta.why.causes.text import causes_text

NUMBER = r"[\d,]*\.?\d+"


def number(text):
    return float(text.replace(",", ""))


def headlines(text):
    """'data loading on rank 1: 20.1 ms a step, 38 % ...', in order, of a report or of `aorta why`."""
    return [line.partition(". ")[2] for line in text.splitlines() if re.match(r"\d\. ", line)]


def title(text: str) -> str:
    return re.search(r"^(.*(?: takes | was not measured).*)$", text, re.M)[1]


def table(text):
    """Name and ms of the rows of the account in a report; the last one is the step."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(r"\bmean +of step\b", line))
    rows = []
    for line in lines[first + 1 :]:
        found = re.match(rf"([a-z][a-z -]*?) +<?({NUMBER}) ms", line)
        if found is None:
            break
        rows.append((found[1], number(found[2])))
        if found[1] == "step":
            break
    return rows


def faults(text, longest_ms):
    """What a text on steps that are at most so long cannot say."""
    step = re.search(rf"takes ({NUMBER}) ms", text)
    step_ms = number(step[1]) if step else longest_ms
    for line in headlines(text):
        ms = re.search(rf": (?:at most )?({NUMBER}) ms a step", line)
        if ms and number(ms[1]) > 1.006 * step_ms:
            yield f"{line}: longer than the step"
        share = re.search(r", (\d+) %", line)
        if share and int(share[1]) > 100:
            yield f"{line}: more than all"
        interval = re.search(rf"\[(-?{NUMBER}), (-?{NUMBER})\]", line)
        if interval and ms:
            low, high = map(float, (interval[1].replace(",", ""), interval[2].replace(",", "")))
            if low <= 0 or not 0.994 * low <= number(ms[1]) <= 1.006 * high:
                yield f"{line}: the interval"
        bound = re.search(rf"without it [a-z ]+ takes {NUMBER} to ({NUMBER}) ms", line)
        if bound and number(bound[1]) > 1.006 * step_ms:
            yield f"{line}: longer than the step"
    of_step = rf"^\d\. [^;]*?: (?:at most )?({NUMBER}) ms a step"
    total = sum(number(found) for found in re.findall(of_step, text, re.M))
    if total > 1.01 * step_ms:
        yield f"causes of {total} ms in a step of {step_ms}"
    for found in re.findall(rf"waits? ({NUMBER}) ms a step", text):
        if number(found) > 1.006 * step_ms:
            yield f"a wait of {found} ms"
    if re.search(r"step None|\bnan\b|\binf\b", text):
        yield "no number"
    if "Cannot tell" in text:
        yield text[text.index("Cannot tell") :].partition("\n")[0]


def outputs(path: Path) -> tuple[Report, Causes, str, str]:
    """Of a run: its report, from which page and summary.json are made; its causes; and what `aorta why` and
    `aorta report` print."""
    report = make_report([path], ["a"], explain=causes_of)
    found, causes = report.datasets["a"], report.causes["a"]
    of_why = causes_of(found, str(path), replays=False)
    return report, of_why, causes_text(of_why, found.first), dataset_table(found, causes=causes)


def disagreements(report: Report, explained: Causes, why: str, printed: str) -> Iterator[str]:
    """Where two outputs say different things of a run, its parts miss their sum, or a sentence cannot be."""
    run = next(iter(report.datasets.values())).first
    account = account_of(run)
    (summary,) = report.summary["datasets"].values()
    for name, ms in account.cells.items():
        if not (ms >= 0).all():
            yield f"{name} is below 0"
    for name, ms in account.outside.items():
        if ms < 0:
            yield f"of the wall time, {name} is {ms} ms"
    record = run.record
    if account.outside and run.source not in TRACE_SOURCES:
        ends_ns = run.start_unix_ns[:, -1] + 1e6 * run.metrics["step_ms"][:, -1]
        wall_ms = (max(record.finished_unix_ns, ends_ns.max()) - record.started_unix_ns) / 1e6
        if abs(account.wall_ms - wall_ms) > 1e-3 * wall_ms:
            yield f"parts of the wall time add up to {account.wall_ms} of {wall_ms} ms"
    of_steps = sum(account.cells.values(), np.zeros_like(account.step_ms))
    if not np.allclose(of_steps, account.step_ms, rtol=1e-3, atol=1e-3):
        yield f"parts of steps miss their sum by {np.abs(of_steps - account.step_ms).max()} ms"
    yield from explained.cannot_tell
    in_steps = sum(cause.ms for cause in explained.listed if cause.is_in_step)
    if in_steps > 1.001 * account.mean_step_ms:
        yield f"causes of {in_steps} ms in a step of {account.mean_step_ms}"

    longest_ms = float(account.step_ms.max(initial=0.0))
    yield from faults(why, longest_ms)
    yield from faults(printed, longest_ms)
    if title(why) != title(printed):
        yield f"why: {title(why)}; report: {title(printed)}"
    of_why = headlines(why)
    if of_why != headlines(printed):
        yield f"why: {of_why}; report: {headlines(printed)}"
    causes = [(cause.kind, cause.ms) for cause in explained.listed]
    if (found := [(one["kind"], one["ms"]) for one in summary["causes"]]) != causes:
        yield f"why: {causes}; summary.json: {found}"
    drawn = page(report)
    shown = re.findall(r"<h3>([^<]*; without it a step[^<]*)</h3>", drawn)
    in_page = [unescape(text).replace("\u00a0", " ").replace("\u2212", "-") for text in shown]
    if in_page != (of_steps_alone := [line for line in of_why if "; without it a step" in line]):
        yield f"why: {of_steps_alone}; page: {in_page}"
    if not account.is_measured:
        return
    *parts, (last, step_ms) = table(printed)
    if last != "step" or abs(step_ms - account.mean_step_ms) > 1e-3 + 0.006 * account.mean_step_ms:
        yield f"the table's last row is {last}, {step_ms} ms of {account.mean_step_ms}"
    if abs((total := sum(ms for _, ms in parts)) - step_ms) > 0.01 + 0.03 * step_ms:
        yield f"the table's rows add up to {total} of {step_ms}"
    of_summary = sum(cell["ms"] for cell in summary["account"]["cells"].values())
    if abs(of_summary - account.mean_step_ms) > 1e-3 * account.mean_step_ms:
        yield f"cells of summary.json add up to {of_summary} of {account.mean_step_ms}"

"""What a machine's GPUs were found to do (`scripts/amd_check.sh` writes it), and whether that is as promised.

`RULES` is the whole of the grade: a line for each promise, with the fact that decides it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from aorta.errors import CANNOT_TELL, FINE, VIOLATED, ConfigError

Fact = float | bool | str | None
Verdict = Literal["pass", "fail", "not run"]
SCHEMA = 1
COST_LEAST = 1.02
"""Recording costs too much where even the low end of its interval is above this."""
COMPUTE_ERROR = 0.03
"""Compute of records beside torch.profiler's, in other steps of the same loop."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the check."""

    seconds: float
    facts: dict[str, Fact]
    reason: str | None = None
    """Why it did not run, or ended early; None where it did."""


class DeviceCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The file: nothing in it names a person, a machine, a folder or a value of the environment."""

    device_check: int
    aorta: str
    torch: str
    runtime: str
    """hip 7.0, cuda 13.0 or none."""
    devices: list[str]
    num_ranks: int
    seconds: float
    parts: dict[str, Part]


class Rule(NamedTuple):
    part: str
    promise: str
    fact: str
    holds: Callable[[Fact], bool]
    bound: str


class Grade(NamedTuple):
    """One line of the grade."""

    rule: Rule
    verdict: Verdict
    found: str


def _is(expected: Fact) -> Callable[[Fact], bool]:
    return lambda fact: fact == expected


def _at_most(bound: float) -> Callable[[Fact], bool]:
    return lambda fact: isinstance(fact, int | float) and fact <= bound


def _at_least(bound: float) -> Callable[[Fact], bool]:
    return lambda fact: isinstance(fact, int | float) and fact >= bound


_NO_RECORDS = tuple(
    Rule("records", promise, fact, _is(0), "0")
    for promise, fact in (
        ("records that found no room in the ring", "num_lost"),
        ("records that the driver dropped", "num_dropped"),
        ("records without times", "num_no_time"),
        ("records later than their step's line", "num_late"),
        ("collectives without a kernel", "num_calls_without_kernel"),
        ("communication kernels without a collective", "num_kernels_without_call"),
    )
)
RULES: tuple[Rule, ...] = (
    Rule("doctor", "what aorta needs works", "num_failed", _is(0), "0 failed"),
    Rule("doctor", "the driver's tracer is there", "has_tracer", _is(True), "yes"),
    Rule("records", "the program ends as without aorta", "exit_status", _is(0), "0"),
    Rule("records", "steps that kernel records time", "share_of_kernels", _at_least(1.0), "all"),
    *_NO_RECORDS,
    Rule("records", "collectives that are seen", "share_seen", _at_least(1.0), "all"),
    Rule("events", "the program ends as without aorta", "exit_status", _is(0), "0"),
    Rule("events", "steps that events time", "share_of_events", _at_least(1.0), "all"),
    Rule("truth", "kernels a step, beside torch.profiler", "kernels_beyond", _at_most(0.0), "the same"),
    Rule(
        "truth",
        "compute a step, beside torch.profiler",
        "compute_error",
        _at_most(COMPUTE_ERROR),
        "within 3 %",
    ),
    Rule("harmless", "training is the same bit by bit when run again", "again", _is(True), "yes"),
    Rule("harmless", "and with the instrument", "native", _is(True), "yes"),
    Rule("cost", "step time with over without, low end", "low", _at_most(COST_LEAST), f"<= {COST_LEAST}"),
    Rule("queues", "hardware queues are as many as set", "num_unlike", _is(0), "0 of the settings differ"),
    Rule("launcher", "the launch script trains on every GPU", "exit_status", _is(0), "0"),
    Rule("launcher", "ranks whose steps are all there", "share_of_ranks", _at_least(1.0), "all"),
    Rule("capture", "the capture script ends well", "exit_status", _is(0), "0"),
    Rule(
        "capture",
        "steps with the profiler's kernels beside the records",
        "share_merged",
        _at_least(0.5),
        "half",
    ),
)


def read_check(path: Path) -> DeviceCheck:
    """The file of a check. Raises ConfigError."""
    try:
        check = msgspec.json.decode(path.read_bytes(), type=DeviceCheck)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of scripts/amd_check.sh: {error}") from error
    if check.device_check != SCHEMA:
        raise ConfigError(f"{path} is of schema {check.device_check}; this aorta grades {SCHEMA}")
    return check


def grade(check: DeviceCheck, rules: Sequence[Rule] = RULES) -> list[Grade]:
    """Each rule beside what was found, in the order of the rules."""
    return [_graded(check, rule) for rule in rules]


def _graded(check: DeviceCheck, rule: Rule) -> Grade:
    part = check.parts.get(rule.part)
    if part is None:
        return Grade(rule, "not run", "left out")
    fact = part.facts.get(rule.fact)
    if fact is None:
        # A part that ran and lacks the number it is for has failed; null is what could not be known here.
        is_lacking = bool(part.facts) and rule.fact not in part.facts
        return Grade(rule, "fail" if is_lacking else "not run", part.reason or "not found")
    return Grade(rule, "pass" if rule.holds(fact) else "fail", _text(fact))


def _text(fact: Fact) -> str:
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return f"{fact:.4g}" if isinstance(fact, float) else str(fact)


def grade_lines(check: DeviceCheck) -> list[str]:
    """The machine, how many lines hold, then each line."""
    grades = grade(check)
    counts = Counter(line.verdict for line in grades)
    devices = ", ".join(f"{n} x {name}" for name, n in Counter(check.devices).items()) or "no GPU"
    width = max(len(line.rule.promise) for line in grades)
    lines = [
        f"{devices}, {check.runtime}, torch {check.torch}, aorta {check.aorta}",
        f"{counts['pass']} lines pass, {counts['fail']} fail, {counts['not run']} did not run",
        "",
    ]
    for line in grades:
        found = line.found if line.verdict == "not run" else f"{line.found} (bound: {line.rule.bound})"
        lines.append(f"{line.verdict:<7}  {line.rule.part:<8}  {line.rule.promise:<{width}}  {found}")
    return lines


def exit_code(check: DeviceCheck) -> int:
    """1 where a line fails, 3 where none fails and one did not run."""
    verdicts = {line.verdict for line in grade(check)}
    return VIOLATED if "fail" in verdicts else CANNOT_TELL if "not run" in verdicts else FINE

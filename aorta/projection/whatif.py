"""Jobs with single numbers of hardware, plan, factors or model changed; comparisons and sweeps of jobs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from aorta.config.yaml_files import near
from aorta.errors import NOT_JSON, AortaError, ConfigError
from aorta.hardware.part import Hardware
from aorta.projection.memory import memory
from aorta.projection.model import Model
from aorta.projection.plan import Plan
from aorta.projection.prices import Anchor, Factors, Pricer
from aorta.projection.step import Projection, project

SECTIONS = ("hardware", "plan", "factors", "model")
INSTEAD = {
    "hardware.scale_up.gpu_bytes_per_s": "hardware.scale_up.sustained_gpu_bytes_per_s",
    "hardware.scale_out.nic_bytes_per_s": "hardware.scale_out.sustained_nic_bytes_per_s",
    "hardware.memory.hbm_bytes_per_s": "hardware.memory.sustained_hbm_bytes_per_s",
}
"""Numbers of the data sheet that only bound others, and those that a projection reads."""


class Job(NamedTuple):
    """A job: everything that a projection reads."""

    model: Model
    plan: Plan
    hardware: Hardware
    factors: Factors
    anchor: Anchor | None = None
    """A measured step that projections start from."""

    def pricer(self) -> Pricer:
        pricer = Pricer(self.hardware, self.plan, factors=self.factors)
        return pricer if self.anchor is None else pricer.with_anchor(self.anchor)

    def project(self) -> Projection:
        return project(self.model, self.plan, self.pricer())


def changed(job: Job, changes: Iterable[str]) -> Job:
    """The job with KEY=VALUE changes; one that no part of the step or its memory reads is refused."""
    previous = _outcome(job) if changes else None
    for text in changes:
        job = _with_change(job, text)
        try:
            outcome = _outcome(job)
        except ArithmeticError:
            raise ConfigError(f"--set {text}: no step ends with that value; a number above 0 would") from None
        if outcome == previous:
            key = text.partition("=")[0].strip()
            instead = f"; {INSTEAD[key]} is what is read" if key in INSTEAD else ""
            raise ConfigError(f"--set {text} has no effect on this job{instead}")
        previous = outcome
    return job


def _outcome(job: Job) -> tuple[Any, ...]:
    memory_estimate = memory(job.model, job.plan, job.hardware.memory.hbm_bytes)
    return (job.project().breakdown_s, memory_estimate.parts, memory_estimate.capacity_bytes)


def _with_change(job: Job, text: str) -> Job:
    key, equals, value = text.partition("=")
    section, _, path = key.strip().partition(".")
    if not equals or section not in SECTIONS or not path:
        raise ConfigError(f"--set {text}: write {'|'.join(SECTIONS)}.FIELD=VALUE, with x2 for twice as much")
    old = getattr(job, section)
    plain = msgspec.to_builtins(old)
    names = path.split(".")
    place: Any = plain
    for name in names[:-1]:
        place = _entry(place, name, text)
    present = _entry(place, names[-1], text, missing_is_none=True)
    place[names[-1]] = _value(present, value.strip(), text)
    try:
        new = msgspec.convert(plain, type(old))
        if isinstance(new, Hardware):
            new = _with_bounds(new)
        job = job._replace(**{section: new})
        job.plan.check(job.model)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set {text}: {error}") from None
    return job


def _with_bounds(hardware: Hardware) -> Hardware:
    """The data sheet's rates of links at least the sustained ones, which a what-if may put above them."""
    up, out = hardware.scale_up, hardware.scale_out
    return msgspec.structs.replace(
        hardware,
        scale_up=msgspec.structs.replace(
            up, gpu_bytes_per_s=max(up.gpu_bytes_per_s, up.sustained_gpu_bytes_per_s)
        ),
        scale_out=msgspec.structs.replace(
            out, nic_bytes_per_s=max(out.nic_bytes_per_s, out.sustained_nic_bytes_per_s)
        ),
    )


def _entry(place: Any, name: str, text: str, missing_is_none: bool = False) -> Any:
    if not isinstance(place, dict) or name not in place:
        entries = place if isinstance(place, dict) else {}
        raise ConfigError(f"--set {text}: there is no {name!r}{near(name, entries)}")
    entry = place[name]
    if isinstance(entry, dict) and missing_is_none:
        raise ConfigError(f"--set {text}: {name} has parts; name one of {', '.join(entry)}")
    return entry


def _value(present: Any, text: str, change_text: str) -> Any:
    """x2 and /2 of a number, else the value itself."""
    scaled = re.fullmatch(r"([x/])\s*([0-9.]+(?:e[+-]?[0-9]+)?)", text)
    if scaled:
        ratio = float(scaled[2])
        if isinstance(present, bool) or not isinstance(present, int | float) or not 0 < ratio < 1e9:
            raise ConfigError(f"--set {change_text}: only a number can be scaled, by more than 0")
        value = present * ratio if scaled[1] == "x" else present / ratio
        return int(value) if isinstance(present, int) and value == int(value) else value
    try:
        number = msgspec.json.decode(text.encode())
    except NOT_JSON:
        return text
    if isinstance(number, int | float) and not isinstance(number, bool) and not -1e30 < number < 1e30:
        raise ConfigError(f"--set {change_text}: the value is out of any range")
    if isinstance(present, int | float) and isinstance(number, int | float) and number < 0 <= present:
        raise ConfigError(f"--set {change_text}: must not be negative, as {present:g} was not")
    return number


def compared(first: Projection, second: Projection) -> dict[str, Any]:
    """Two projections side by side: the steps, and what each part of the difference is."""
    names = sorted({*first.breakdown_s, *second.breakdown_s})
    parts = {
        name: [first.breakdown_s.get(name, 0.0) * 1e3, second.breakdown_s.get(name, 0.0) * 1e3]
        for name in names
    }
    return {
        **{name: [value, second.times[name]] for name, value in first.times.items()},
        "faster": second.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu,
        "breakdown_ms": parts,
    }


def compared_text(comparison: Mapping[str, Any]) -> str:
    """A table of the two, and a bar for each difference."""
    first, second = comparison["step_ms"]
    rates = comparison["tokens_per_s_per_gpu"]
    lines = [
        f"{'':24s}{'A':>12s}{'B':>12s}{'B - A':>12s}",
        f"{'step ms':24s}{first:12.1f}{second:12.1f}{second - first:+12.1f}",
        f"{'tokens/s/GPU':24s}{rates[0]:12.0f}{rates[1]:12.0f}{rates[1] - rates[0]:+12.0f}"
        f"   B is {comparison['faster']:.3f} times as fast",
        "",
    ]
    differences = {name: pair[1] - pair[0] for name, pair in comparison["breakdown_ms"].items()}
    largest = max((abs(value) for value in differences.values()), default=0.0)
    for name, value in sorted(differences.items(), key=lambda item: -abs(item[1])):
        if abs(value) > 1e-3 * max(first, second):
            first_ms, second_ms = comparison["breakdown_ms"][name]
            bar = ("+" if value > 0 else "-") * max(1, round(20 * abs(value) / largest))
            lines.append(f"{name:24s}{first_ms:12.1f}{second_ms:12.1f}{value:+12.1f}   {bar}")
    return "\n".join(lines)


def sweep_values(text: str) -> list[int]:
    """8..1024 is every power of two from 8 to 1024; 8,24,64 are themselves."""
    span = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)
    if span:
        low, high = int(span[1]), int(span[2])
        if not 1 <= low <= high:
            raise ConfigError(f"{text}: the first must be at least 1 and not above the last")
        values = [low]
        while values[-1] * 2 <= high:
            values.append(values[-1] * 2)
        return values
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        return [int(part) for part in text.split(",")]
    raise ConfigError(f"{text}: write FIRST..LAST for powers of two between, or A,B,C")


def swept(rows: Sequence[tuple[int, Projection | AortaError]], axis: str) -> dict[str, Any]:
    """A row for each value, with the reason where there is no projection."""
    table_rows: list[dict[str, Any]] = []
    for value, projection in rows:
        if isinstance(projection, AortaError):
            table_rows.append({axis: value, "reason": str(projection)})
            continue
        interval = list(projection.tokens_interval)
        table_rows.append({axis: value, **projection.times, "interval_tokens": interval})
    return {"axis": axis, "rows": table_rows}


def swept_text(table: Mapping[str, Any]) -> str:
    """Rates as a table with bars, the interval drawn as dots beyond the bar."""
    axis = table["axis"]
    judged = [row for row in table["rows"] if "step_ms" in row]
    highest = max((row["interval_tokens"][1] for row in judged), default=1.0)
    lines = [f"{axis:>8s}{'step ms':>12s}{'tokens/s/GPU':>14s}"]
    for row in table["rows"]:
        if "reason" in row:
            lines.append(f"{row[axis]:8d}   {row['reason']}")
            continue
        low, high = (round(36 * value / highest) for value in row["interval_tokens"])
        bar = "#" * low + ":" * (high - low)
        lines.append(f"{row[axis]:8d}{row['step_ms']:12.1f}{row['tokens_per_s_per_gpu']:14.0f}   {bar}")
    lines.append("# certain, : within the interval")
    return "\n".join(lines)

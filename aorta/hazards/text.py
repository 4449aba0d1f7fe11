"""Findings as text for the terminal."""

import operator
import re
from collections.abc import Sequence
from math import prod

from aorta.hazards.findings import Checked, Finding, merged
from aorta.hazards.numbers import Difference

MAX_SHOWN = 12
WORDS = {
    "race": "race",
    "reuse": "memory freed too early",
    "latent": "memory freed too early (latent: strikes where the next allocation gets it)",
}


def checked_text(all_checked: Sequence[Checked], show_all: bool = False) -> str:
    """What the check of a run found: a line that sums up, then a paragraph a finding, then the coverage."""
    findings = merged(all_checked)
    shown = [finding for finding in findings if finding.status != "known"]
    differences = [difference for checked in all_checked for difference in checked.differences]
    lines = [summary(all_checked, findings, differences)]
    for number, finding in enumerate(shown if show_all else shown[:MAX_SHOWN], start=1):
        lines += ["", *_finding(number, finding)]
    if len(shown) > MAX_SHOWN and not show_all:
        lines += ["", f"{len(shown) - MAX_SHOWN} more; --all shows them"]
    if differences:
        lines += ["", *_differences(differences, show_all)]
    known = [finding for finding in findings if finding.status == "known"]
    if known:
        reasons = dict.fromkeys(finding.reason for finding in known)
        lines += ["", f"{_count(len(known), 'known exception')}: {'; '.join(reasons)}"]
    lines += ["", *coverage_lines(all_checked)]
    return "\n".join(lines)


def summary(
    all_checked: Sequence[Checked], findings: Sequence[Finding], differences: Sequence[Difference]
) -> str:
    """One line: how many findings of which status, in how many steps."""
    num = {status: sum(f.status == status for f in findings) for status in ("confirmed", "possible")}
    num_steps = max((len(checked.steps) for checked in all_checked), default=0)
    words = [f"{number} {status}" for status, number in num.items() if number] or ["no finding"]
    if differences:
        words.append(_count(len({(one.rank, one.name) for one in differences}), "wrong number"))
    return f"{', '.join(words)} in {_count(num_steps, 'checked step')} of {_count(len(all_checked), 'rank')}"


def _finding(number: int, finding: Finding) -> list[str]:
    seen = f"{_count(finding.count, 'time')}, first in step {finding.first_step}, {_ranks(finding.ranks)}"
    tensors = [place.site.tensor for place in (finding.later, finding.earlier)]
    # Of a parameter whole: the same line may have come to another one first.
    holds = operator.eq if finding.parameter else operator.ge
    tensor = next((one for one in tensors if one and holds(_num_bytes(one), finding.num_bytes)), "")
    lines = [f"{number}. {finding.status}: {WORDS[finding.kind]}, {seen}"]
    for side, place in (("later", finding.later), ("earlier", finding.earlier)):
        lines.append(f"   {side:9}{place.site}")
        if place.site.inside and place.site.where:
            lines.append(f"   {'':9}by {place.site.inside}")
        if place.site.module:
            lines.append(f"   {'':9}first in module {place.site.module}")
        lines.append(f"   {'':9}on {place.stream}")
    of = (f" of {tensor}" if tensor else "") + (f", {finding.parameter}" if finding.parameter else "")
    lines.append(f"   the later one {finding.rule}: {finding.num_bytes:,} bytes{of}")
    if finding.following is not None:
        lines.append(f"   the memory then goes to {finding.following}")
    lines.append(f"   missing  {finding.missing}")
    if finding.hint:
        lines.append(f"   note     {finding.hint}")
    if finding.reason:
        lines.append(f"   note     {finding.reason}")
    return lines


def _num_bytes(tensor: str) -> int:
    """Of a tensor in words, such as float32[2, 8]. A site's is the first that it had; what a finding is about
    may be a later one, of another shape."""
    dtype, _, shape = tensor.rstrip("]").partition("[")
    bits = 8 if dtype.startswith(("float8", "bool")) else int(next(iter(re.findall(r"\d+", dtype)), 8))
    return prod(map(int, filter(None, shape.split(", ")))) * bits // 8


def _differences(differences: Sequence[Difference], show_all: bool) -> list[str]:
    ordered = sorted(differences, key=lambda d: (d.step, d.place, d.rank))
    of_name: dict[tuple[int, str], list[Difference]] = {}
    for difference in ordered:
        of_name.setdefault((difference.rank, difference.name), []).append(difference)
    lines = ["wrong numbers, the first first:"]
    for (rank, name), same in list(of_name.items())[: None if show_all else MAX_SHOWN]:
        later = len({difference.step for difference in same}) - 1
        more = f"; wrong in {_count(later, 'later checked step')} too" if later else ""
        lines.append(f"   step {same[0].step}, rank {rank}: {name}: {same[0].detail}{more}")
    if len(of_name) > MAX_SHOWN and not show_all:
        lines.append(f"   {len(of_name) - MAX_SHOWN} more places; --all shows them")
    return lines


def coverage_lines(all_checked: Sequence[Checked]) -> list[str]:
    """What the check saw, and what it could not see."""
    seen: dict[str, int] = {}
    for checked in all_checked:
        for how, number in checked.seen.items():
            seen[how] = seen.get(how, 0) + number
    words = [f"{number:,} {how}" for how, number in seen.items()]
    lines = [f"accesses seen: {', '.join(words) or 'none'}"]
    lines.append(f"fingerprints compared: {sum(checked.num_compared for checked in all_checked):,}")
    lines += [
        f"not seen: {text}" for text in dict.fromkeys(t for checked in all_checked for t in checked.blind)
    ]
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    unique = sorted(set(ranks))
    return f"{'rank' if len(unique) == 1 else 'ranks'} {', '.join(map(str, unique[:8]))}" + (
        f" and {len(unique) - 8} more" if len(unique) > 8 else ""
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

"""Findings as a run keeps them: a file per rank, read back and merged over ranks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from aorta.errors import NOT_JSON, RecordError
from aorta.files import read_regular, write_whole
from aorta.hazards.numbers import Call, Difference, Numbered, Parameter, differences
from aorta.records.files import HAZARDS_FILES, hazards_name

DEFAULT_STREAM, NCCL = "default stream", "NCCL stream"
Status = Literal["confirmed", "possible", "known"]
"""confirmed: with the earlier operation delayed, the later one ran first and values changed. known: an
exception that a file of exceptions names."""


class Site(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an operation was issued."""

    operation: str
    where: str = ""
    """file:line of the user's code; empty where only torch's own code was on the stack."""
    inside: str = ""
    """file:line in torch, where that is nearer."""
    function: str = ""
    """Qualified name of the function at `where`, such as Attention.forward."""
    module: str = ""
    """The first module whose code issued it, by its name in the outermost one."""
    tensor: str = ""
    """Type and shape of the first tensor."""
    is_collective: bool = False

    @property
    def place(self) -> str:
        """Where, in words with a preposition; empty where nothing is known."""
        at, within = self.where or self.inside, self.function
        return " ".join((f"at {at}",) * bool(at) + (f"in {within}",) * bool(within))

    def __str__(self) -> str:
        return f"{self.operation} {self.place}".rstrip()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a finding."""

    stream: str
    site: Site


class Finding(msgspec.Struct, kw_only=True):
    """Two accesses to the same bytes that nothing orders."""

    kind: Literal["race", "reuse", "latent"]
    status: Status = "possible"
    rank: int
    earlier: Place
    later: Place
    following: Site | None = None
    """Of memory that was freed too early: its next allocation."""
    rule: str
    num_bytes: int
    parameter: str = ""
    """The parameter or gradient that has these bytes, in words; empty where none has."""
    missing: str
    """Code that would order the two."""
    hint: str = ""
    count: int
    """Pairs of operations in the checked steps."""
    first_step: int
    reason: str = ""
    """Of a known one: why it is harmless. Of a possible one: why it was not confirmed."""
    ranks: list[int] = []


class Checked(msgspec.Struct, kw_only=True):
    """What the check of one rank saw and found."""

    rank: int
    steps: list[int]
    """Steps that were checked."""
    num_operations: int = 0
    seen: dict[str, int] = {}
    """Operations by how their accesses were seen: exactly, by address alone, not at all."""
    blind: list[str] = []
    """What the check could not see, and why."""
    findings: list[Finding] = []
    differences: list[Difference] = []
    calls: list[Call] = []
    parameters: list[Parameter] = []
    """Fingerprints of checked steps; read_checked compares and drops them."""
    num_compared: int = 0
    """Fingerprints that were compared."""


def missing_order(waiting: str, awaited: str, earlier: Site, later: Site, kind: str) -> str:
    """Code for the order that two operations lack."""
    if kind != "race" and later.operation == "free":
        return (
            f"tensor.record_stream({_name(awaited)}) before it is freed, "
            f"or {_name(waiting)}.wait_stream({_name(awaited)})"
        )
    if earlier.is_collective and awaited.startswith((NCCL, "the collective")):
        return f"work.wait() on {waiting} before {later.operation}"
    if waiting == "host":
        return f"{_name(awaited)}.synchronize() before {later.operation}"
    return f"{_name(waiting)}.wait_stream({_name(awaited)}) before {later.operation}"


def _name(stream: str) -> str:
    """Code for a stream that was given in words."""
    name = stream.removeprefix("stream ")
    return name if name.isidentifier() else stream.replace(" ", "_")


def write_checked(folder: Path, checked: Checked) -> None:
    """Write a rank's file. It is not waited for on its way to the disk: training stands still meanwhile."""
    data = msgspec.json.format(msgspec.json.encode(checked))
    write_whole(folder / hazards_name(checked.rank), data, durable=False)


def read_checked(folder: Path) -> list[Checked]:
    """What each rank of a run's folder found, by rank; empty where nothing was checked.

    Raises RecordError for a file that is damaged.
    """
    found = list[Checked]()
    for path in folder.glob(HAZARDS_FILES):
        try:
            found.append(msgspec.json.decode(read_regular(path), type=Checked))
        except OSError as error:
            raise RecordError(f"cannot read {path}: {error.strerror or error}") from None
        except NOT_JSON as error:
            raise RecordError(f"{path} is not what a check writes: {error}") from None
    found.sort(key=lambda checked: checked.rank)
    by_rank = {checked.rank: checked for checked in found}
    numbered = [Numbered(rank=c.rank, calls=c.calls, parameters=c.parameters) for c in found]
    for difference in differences(numbered):
        by_rank[difference.rank].differences.append(difference)
    for checked in found:
        checked.num_compared = len(checked.calls) + len(checked.parameters)
        checked.calls, checked.parameters = [], []
    return found


def merged(all_checked: Iterable[Checked]) -> list[Finding]:
    """Findings of all ranks, those of the same sites once; confirmed ones first, then by kind and count. What
    was handed on is not told as latent too."""
    by_sites: dict[object, Finding] = {}
    for finding in (finding for checked in all_checked for finding in checked.findings):
        key = (finding.kind, finding.earlier, finding.later)
        known = by_sites.get(key)
        if known is None:
            by_sites[key] = msgspec.structs.replace(finding, ranks=[finding.rank])
            continue
        known.ranks.append(finding.rank)
        known.count += finding.count
        known.first_step = min(known.first_step, finding.first_step)
        if finding.status == "confirmed":
            known.status, known.reason = "confirmed", ""
    reused = {(finding.earlier, finding.later) for finding in by_sites.values() if finding.kind == "reuse"}
    found = [f for f in by_sites.values() if f.kind != "latent" or (f.earlier, f.later) not in reused]
    order = ("confirmed", "possible", "known")
    kinds = ("race", "reuse", "latent")
    return sorted(found, key=lambda f: (order.index(f.status), kinds.index(f.kind), -f.count))

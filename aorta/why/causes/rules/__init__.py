"""Rules as data: from how much on a finding is a cause, its words, what to change, how to check it.

A rule is a YAML file of this folder, named for its kind. docs/report.md describes the keys.
"""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import msgspec

from aorta.account.cause import CauseKind
from aorta.errors import ConfigError
from aorta.why.causes.program import STACKS, effects_of_settings


class RuleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to set, where the run uses all of these."""

    stack: list[str]
    set: str
    waits: bool | None = None
    """Only where it is one rank that the others wait for (true), or all ranks alike (false)."""
    op: str | None = None
    """Only where the finding is of this operation."""
    origin: str | None = None
    """Only where most of it is of this: bucket (of DDP), accumulated (the same gradients several times a
    step), unit (of fully_shard), zero (parameters that a ZeroRedundancyOptimizer sends), gradients (reduced
    by hand), one_rank (which gets them, and sends them or weights back), weights (broadcast, all of them),
    results (gathered behind the update), level (units that a module holds), object (pickled), buffers (of
    the model), own (what the program sends beside all these), program (nobody looked what it is). Of the
    program's own code, what samples show it to be in: values (of which it makes tensors), operators (of
    torch), python (libraries beside torch, and not in that), or dealt: batches that a rank sends to the
    others. Of a late rank, dealt as well, or launch: its host launches late."""
    calls: str | None = None
    """Only where the cause's line of the program is in a library's function of this pattern: '* of torch'."""
    rare: bool | None = None
    """Only where the loss is in few steps, or in all."""
    of: str = ""
    """What its cause's origin is then: workers (more of a loader's); '' where that is the origin or operation
    above."""
    is_left: bool = False
    """The best part of it is set already: what is left is told of larger losses alone."""


class CauseRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: CauseKind
    least_share: float
    """Part of the step from which on the loss is a cause."""
    least_share_on_cpu: float | None = None
    """The same for ranks on a CPU, whose cores other processes use too; None: as least_share."""
    least_share_by: dict[str, float] = {}
    """Instead of both, of findings of this operation, or of calls that move this."""
    least_share_proven: float | None = None
    """Instead of all three, where records prove that the loss need not be: gradients that are reduced several
    times between two updates, communication of devices of which nothing is hidden."""
    least_share_set: float | None = None
    """Instead of all these but the last, where one of `settings` is set, which makes the loss larger."""
    needs_interval: bool = True
    """Whether the loss must be sure: its interval, or four of five steps, above half of least_share. Not
    where the program was seen to do it."""
    subject: str
    """With facts of the finding in braces, as everything below."""
    evidence: list[str]
    """A sentence whose facts are not all known is left out."""
    change: list[RuleChange]
    """The first that fits the run's stack."""
    made: dict[str, tuple[str, ...]] = {}
    """By operation, origin or layer of a finding, or 'any' where it has no line: 'of a table made', and how a
    piece of the source begins where that is, as patterns. length: of the rows that a finding is of."""
    settings: list[str] = []
    """Keys of settings.yaml: environment variables with a value ('NCCL_P2P_DISABLE=1') under which such a
    loss is larger, which is said before the change."""
    check: str

    def begins(self, key: str) -> str:
        """The pattern of where that is made."""
        return "|".join(self.made[key][1:])


class CallRemedy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do instead of a library's function that a line of the program calls."""

    calls: list[str]
    """Patterns of it, or of the one in which that is then, as samples name them; of what has no frame also
    without what it is called of: 'tolist' of 'x.tolist'."""
    set: str
    makes: bool = False
    """It prepares batches, which workers of a loader can do beforehand."""
    in_passes: bool = False
    """Of an operator of models that has a faster form, or that training does not need."""
    stack: list[str] = []
    kinds: list[CauseKind] = []
    """Of causes; of any where empty."""


@cache
def call_remedies() -> list[CallRemedy]:
    from aorta.config.yaml_files import read_structs

    return read_structs(Path(__file__).parent.with_name("calls.yaml"), list[CallRemedy])


def instead_of(calls: tuple[str, ...], kind: CauseKind, stack: frozenset[str]) -> CallRemedy | None:
    """The first remedy of the first of these functions that has one."""
    fit = [one for one in call_remedies() if stack.issuperset(one.stack) and kind in (one.kinds or [kind])]
    for call in calls:
        names = {call, call if " of " in call else call.rpartition(".")[2]}
        for remedy in fit:
            if any(fnmatchcase(name, each) for name in names for each in remedy.calls):
                return remedy
    return None


@cache
def faster_form(call: str) -> str | None:
    """Of an operator that a model calls, by its name in samples."""
    remedy = instead_of((call,), "program_code", frozenset())
    return remedy.set if remedy is not None and remedy.in_passes else None


@cache
def rules() -> dict[CauseKind, CauseRule]:
    """By kind. ConfigError in one line where a file of the package is not a rule."""
    from aorta.config.yaml_files import read_structs

    rule_of: dict[CauseKind, CauseRule] = {}
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        rule = read_structs(file, CauseRule, file.name)
        if file.name != f"{rule.kind}.yaml":
            raise ConfigError(f"{file.name}: kind is {rule.kind}: the file must have its name")
        unknown = {name for change in rule.change for name in change.stack} - set(STACKS)
        unknown |= set(rule.settings) - effects_of_settings().keys()
        if unknown or rule.change[-1].stack != ["any"]:
            raise ConfigError(f"{file.name}: the last change must be for 'any'; unknown: {sorted(unknown)}")
        rule_of[rule.kind] = rule
    return rule_of

"""Which kernels are communication, and which collective they carry out.

Metadata of the trace comes first (the reader's work); this table of kernel names comes after it.
AMD names every collective ncclDevKernel_Generic, so a name often tells communication but no
operation: the operation is then UNKNOWN.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from aorta.errors import ConfigError, TraceError
from aorta.timeline.collective import canonical_op

UNKNOWN = "unknown"
"""A collective whose operation neither metadata nor the kernel's name tells."""

COPY_KERNEL = "copy_kernel"
"""Op of a kernel that only copies. It counts as compute and is named beside it."""


class CommRule(NamedTuple):
    pattern: str
    """Regular expression searched in the kernel's name, without regard to case."""
    op: str | None = None
    """The operation; None: look for it in the name, else UNKNOWN."""


COMM_RULES: tuple[CommRule, ...] = (
    CommRule(r"nccl|rccl"),  # also ncclDevKernel_Generic_*, rcclGenericKernel
    CommRule(r"msccl"),
    CommRule(r"deep_?ep::|deepep|internode_ll|mori::.*(dispatch|combine)", "all_to_all"),
    CommRule(
        r"cross_device_reduce|(one|two)_?shot_?all_?reduce|quick_?reduce|multimem_all_reduce", "all_reduce"
    ),
    CommRule(r"multimem_all_gather", "all_gather"),
    CommRule(r"custom_?all_?reduce|trtllm_?all_?reduce|allreduce_fusion", "all_reduce"),
    CommRule(r"nvshmem|rocshmem"),
)
"""Searched from the top, the first match decides. A program with its own kernels puts its rules
before these: read_kineto(path, rules=(CommRule(r"my_exchange", "all_to_all"), *COMM_RULES)), or in a
file for load_rules. Names of copies are searched too, for collectives that copy engines carry out."""

OPS_IN_NAMES = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|alltoallv|broadcast|send_?recv|reduce(?=_|$)",
    re.IGNORECASE,
)
HELPERS = re.compile(r"checkForNaN|at::native::|at::cuda::|__amd_rocclr_", re.IGNORECASE)
"""Kernels that the process group or the runtime launches beside the collective's own: the metadata of
a collective does not make them communication."""
COPY_NAMES = re.compile(r"__amd_rocclr_(copy|fill)|^MEMORY_COPY_|^(hip)?mem(cpy|set)", re.IGNORECASE)


MOST_NAMES = 100_000
"""That are remembered."""
LONGEST_NAME = 4096
"""Part of a kernel's name that is searched: patterns cost more than linear time in a long one."""


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    pattern: str
    op: str | None = None


class _RuleFile(msgspec.Struct, forbid_unknown_fields=True):
    communication: list[_Rule]


def load_rules(path: Path | str) -> tuple[CommRule, ...]:
    """The rules of a YAML file, before those of COMM_RULES.

    communication:
      - {pattern: my_exchange, op: all_to_all}   # op may be left out
    """
    from aorta.config.yaml_files import read_yaml  # few readings of traces have rules: YAML costs 20 ms

    try:
        rows = msgspec.convert(read_yaml(path), _RuleFile).communication
    except (ConfigError, msgspec.ValidationError) as error:
        raise TraceError(
            f"{path} is no table of rules: {error}; it needs communication: [{{pattern: ..., op: ...}}]"
        ) from error
    rules = []
    for row in rows:
        op = None if row.op is None else canonical_op(row.op)
        if row.op is not None and op is None:
            raise TraceError(f"{path}: {row.op!r} is no collective; all_reduce, all_gather, ... are")
        try:
            re.compile(row.pattern, re.IGNORECASE)
        except (re.error, OverflowError, RecursionError) as error:
            raise TraceError(f"{path}: {row.pattern!r} is no regular expression: {error}") from error
        rules.append(CommRule(row.pattern, op))
    return (*rules, *COMM_RULES)


@cache
def classifier(rules: tuple[CommRule, ...]) -> "Classifier":
    """The one for these rules: ranks of a run have the same names."""
    return Classifier(rules)


class Classifier:
    """Answers by kernel name, remembering each: a trace has many kernels and few names."""

    def __init__(self, rules: Sequence[CommRule] = COMM_RULES) -> None:
        self._rules = [(re.compile(pattern, re.IGNORECASE), op) for pattern, op in rules]
        self._op_of_name: dict[str, str | None] = {}

    def comm_op(self, kernel: str) -> str | None:
        """The collective that this kernel carries out; None where it is no communication."""
        try:
            return self._op_of_name[kernel]
        except KeyError:
            if len(self._op_of_name) >= MOST_NAMES:
                self._op_of_name.clear()
            op = self._op_of_name[kernel] = self._search(kernel)
            return op

    def _search(self, kernel: str) -> str | None:
        kernel = kernel[:LONGEST_NAME]
        for pattern, op in self._rules:
            if pattern.search(kernel):
                return op or op_in_name(kernel)
        return None


def op_in_name(kernel: str) -> str:
    match = OPS_IN_NAMES.search(kernel)
    return (canonical_op(match.group()) if match else None) or UNKNOWN


@lru_cache(MOST_NAMES)
def compute_op(kernel: str) -> str:
    """The class of a kernel that is no communication."""
    return COPY_KERNEL if COPY_NAMES.search(kernel[:LONGEST_NAME]) else "kernel"

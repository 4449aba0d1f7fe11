"""Options of a workload as text: which types a field of WorkloadOptions may have, and how they are read.

A field is `int`, `float`, `bool`, `str`, a `Literal` of strings, one of the types below, or one of these
`| None`; every field has a default. A help text is a `Help` in an Annotated:

    class Options(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
        num_compute: Annotated[int, Help("GEMMs of each compute stream")] = 10
        comm_size: Annotated[Bytes, Help("bytes of each collective")] = 128 * 2**20
        mm_dim: Annotated[Dims, Help("M,N,K of the GEMMs")] = (4096, 4096, 4096)
        process_groups: Annotated[Groups | None, Help("ranks of each group")] = None
        comp_dtype: Annotated[Dtype, Help("of the GEMMs")] = "bfloat16"
        real_collectives: Annotated[bool, Help("refuse to simulate")] = False

Command line: `--num-compute 10 --comm-size 128M --mm-dim 4096 --process-groups "[0,1],[2,3]"
--comp-dtype bfloat16 --real-collectives`. K, M and G are 2^10, 2^20 and 2^30; one `--mm-dim` stands for all
three. A field `process_groups` is the harness's: Context.group is then this rank's group of them. Limits of a
value (at_least_one, say) belong into the struct's `__post_init__`, as a ConfigError.
"""

import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import torch

from aorta.errors import NOT_JSON, ConfigError
from aorta.queues.catalogue import ListedOption, flag_of
from aorta.queues.workload import WorkloadOptions


@dataclass(frozen=True)
class Help:
    """Help of an option, in a few words."""

    text: str


@dataclass(frozen=True)
class Notation:
    """Notation of a value on the command line."""

    kind: Literal["bytes", "dims", "groups"]


Bytes = Annotated[int, Notation("bytes")]
"""A number of bytes: 4096, 64K, 1.5M, 2G."""
Dims = Annotated[tuple[int, int, int], Notation("dims")]
"""M, N, K of a matrix multiply: 4096 or 4096,4096,8192."""
Groups = Annotated[tuple[tuple[int, ...], ...], Notation("groups")]
"""Ranks of each process group: [0,1],[2,3]."""
Dtype = Literal["float32", "float16", "bfloat16"]
"""Give it to torch_dtype."""


def torch_dtype(name: Dtype) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def at_least_one(options: WorkloadOptions, *names: str) -> None:
    """ConfigError for the first of these fields that is neither None nor at least 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag_of(name)} must be at least 1, got {value}")


def fields(options: type[WorkloadOptions]) -> dict[str, ListedOption]:
    """Fields of a workload's options, in the order of the struct."""
    hints = get_type_hints(options, include_extras=True)
    return {info.name: _field(info, hints[info.name]) for info in msgspec.structs.fields(options)}


def _field(info: msgspec.structs.FieldInfo, hint: Any) -> ListedOption:
    notes: list[Any] = []
    base = _bare(hint, notes)
    notation: str | None = next((note.kind for note in notes if isinstance(note, Notation)), None)
    text = next((note.text for note in notes if isinstance(note, Help)), "")
    choices = get_args(base) if get_origin(base) is Literal else ()
    if notation is None:
        notation = "choice" if choices else {bool: "bool", int: "int", float: "float", str: "str"}.get(base)
    assert notation is not None, f"{info.name}: {hint} is no type for an option"
    assert info.default is not msgspec.NODEFAULT, f"{info.name}: an option needs a default"
    return ListedOption(info.name, notation, choices, text)


def _bare(hint: Any, notes: list[Any]) -> Any:
    """The type inside Annotated and `| None`; what annotates it is added to notes."""
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        notes += metadata
        return _bare(inner, notes)
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part is not types.NoneType]
        assert len(inner) == 1, f"{hint}: an option has one type, or that and None"
        return _bare(inner[0], notes)
    return hint


def read_options(options: type[WorkloadOptions], texts: Mapping[str, str | bool]) -> WorkloadOptions:
    """The struct from the texts of flags (by field name); what is not given has its default.

    ConfigError, in one line that names the flag, for text that does not parse.
    """
    option_fields = fields(options)
    values = {name: _value(option_fields[name], text) for name, text in texts.items()}
    result: WorkloadOptions = options(**values)
    return result


def _value(field: ListedOption, text: str | bool) -> Any:
    if isinstance(text, bool):
        assert field.notation == "bool"
        return text
    read = {"bytes": read_bytes, "dims": read_dims, "groups": read_groups, "int": _int, "float": _float}
    if field.notation == "choice" and text not in field.choices:
        raise ConfigError(f"{field.flag} must be one of {', '.join(field.choices)}, got {text!r}")
    return read[field.notation](text, field.flag) if field.notation in read else text


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def read_bytes(text: str, flag: str) -> int:
    """64K is 65536; ConfigError where it is not a positive whole number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if size < 1 or size != int(size) or size > 2**50:
        raise ConfigError(f"{flag} must be a size such as 4096, 64K, 128M or 2G, got {text!r}")
    return int(size)


def read_dims(text: str, flag: str) -> tuple[int, int, int]:
    """One number for all three of M, N, K, or three."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal()]
    if len(numbers) != len(parts) or len(parts) not in (1, 3) or min(numbers) < 1:
        raise ConfigError(f"{flag} must be one size or M,N,K such as 4096 or 4096,4096,8192, got {text!r}")
    m, n, k = numbers * 3 if len(numbers) == 1 else numbers
    return m, n, k


def read_groups(text: str, flag: str) -> tuple[tuple[int, ...], ...]:
    """`[0,1],[2,3]`, outer brackets allowed; ranks once each."""
    groups = _lists(f"[{text}]") or _lists(text) or []
    flat = [rank for group in groups for rank in group]
    if not groups or not all(groups) or min(flat) < 0 or len(set(flat)) != len(flat):
        raise ConfigError(f'{flag} must name every rank once, such as "[0,1],[2,3]", got {text!r}')
    return tuple(tuple(group) for group in groups)


def _lists(text: str) -> list[list[int]] | None:
    try:
        return msgspec.json.decode(text, type=list[list[int]])
    except NOT_JSON:
        return None


def check_groups(groups: tuple[tuple[int, ...], ...], world_size: int) -> None:
    """ConfigError unless the groups hold every rank of the run exactly once."""
    named = sorted(rank for group in groups for rank in group)
    if named != list(range(world_size)):
        raise ConfigError(
            f"--process-groups must hold each of the {world_size} ranks exactly once "
            f"(0 to {world_size - 1}), got {', '.join(str(list(group)) for group in groups)}"
        )


def _int(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} must be a whole number, got {text!r}") from None


def _float(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{flag} must be a number, got {text!r}")
    return value

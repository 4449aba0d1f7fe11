"""Catalogue of workloads for the command line, read from a file, so that help does not wait for torch.

The workloads' own files are where all of it is stated; scripts/queues_catalogue.py writes it down.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import msgspec

from aorta.queues.words import Category, Priority, flag_of

CATALOGUE = Path(__file__).with_name("catalogue.json")


class ListedOption(msgspec.Struct, frozen=True):
    """An option of a workload."""

    name: str
    notation: str
    """bytes, dims, groups; else bool, int, float, str, choice."""
    choices: tuple[str, ...]
    help: str

    @property
    def flag(self) -> str:
        return flag_of(self.name)


class ListedWorkload(msgspec.Struct, frozen=True):
    """A workload as `list` and `--help` show it."""

    name: str
    category: Category
    priority: Priority
    unit: str
    question: str
    stream_meaning: str
    min_streams: int
    max_streams: int
    options: tuple[ListedOption, ...]


@functools.cache
def catalogue() -> Mapping[str, ListedWorkload]:
    """Listed workloads by name, sorted as the registry sorts them."""
    listed = msgspec.json.decode(CATALOGUE.read_bytes(), type=list[ListedWorkload])
    return {workload.name: workload for workload in listed}

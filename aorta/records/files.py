"""Names of the files in the folder of a run."""

import re
from pathlib import Path
from typing import NamedTuple

TRACE_FOLDER, HANG_FOLDER = "torch_profiler", "hang"
"""Of the traces that a run has recorded of its ranks, and of what these report where no step begins."""
RUN_FILES = (
    "run.json", "rank_*_metrics.jsonl", "rank_*_columns.*", "rank_*_state.jsonl", "rank_*_kernels.json",
    "rank_*_sites.json", "rank_*_stacks.jsonl", "rank_*_workers.jsonl", "rank_*_memory.json",
    "rank_*_hazards.json", "rank_*_dropped.json", "node_*_digest.bin", "launch_*.jsonl",
    ".rank_*_unwritten", ".rank_*_calls", ".rank_*_counts", ".overhead", TRACE_FOLDER, "tensorboard",
    HANG_FOLDER,
)  # fmt: skip
"""Patterns of everything that a run leaves in its folder."""
LAUNCH_FILES = "launch_*.jsonl"
"""Pattern of what launchers saw of a run (aorta.records.launches)."""
STEPS_FILES, STATE_FILES, COLUMNS_FILES = "rank_*_metrics.jsonl", "rank_*_state.jsonl", "rank_*_columns.arrow"
HAZARDS_FILES = "rank_*_hazards.json"
"""Patterns of the files of all ranks."""
STEPS_FILE = re.compile(r"rank_(\d+)_metrics\.jsonl")
STATE_FILE = re.compile(r"rank_(\d+)_state\.jsonl")
"""Names of one rank's files; the rank is the first group."""
DIGEST_FILE = re.compile(r"node_(\d{1,9})_digest\.bin")
"""Names of a node's files; its first rank is the first group."""


def steps_name(rank: int) -> str:
    """The file of a rank's step records, one line of JSON each."""
    return f"rank_{rank}_metrics.jsonl"


def columns_name(rank: int) -> str:
    """The file of the numbers of a rank's lines as columns (aorta.records.columns)."""
    return f"rank_{rank}_columns.arrow"


def state_name(rank: int) -> str:
    """The file that says where a rank stands and how it ended (aorta.records.state)."""
    return f"rank_{rank}_state.jsonl"


def digest_name(first_rank: int) -> str:
    """The file of the newest numbers of a node's ranks (aorta.records.digests)."""
    return f"node_{first_rank}_digest.bin"


def kernels_name(rank: int) -> str:
    """The file of the names of kernels that a rank's lines refer to."""
    return f"rank_{rank}_kernels.json"


def sites_name(rank: int) -> str:
    """The file of the places that issue a rank's collectives."""
    return f"rank_{rank}_sites.json"


def stacks_name(rank: int) -> str:
    """The file of the stacks that were sampled in a rank (aorta.records.stacks)."""
    return f"rank_{rank}_stacks.jsonl"


def workers_name(rank: int) -> str:
    """The file of what the workers of a rank's DataLoaders do (aorta.records.workers)."""
    return f"rank_{rank}_workers.jsonl"


def memory_name(rank: int) -> str:
    """The file that says what held a rank's memory when there was too little of it."""
    return f"rank_{rank}_memory.json"


def hazards_name(rank: int) -> str:
    """The file of what `aorta check` found in a rank's checked steps (aorta.hazards.findings)."""
    return f"rank_{rank}_hazards.json"


def last_calls_name(rank: int) -> str:
    """The file of a rank's latest collectives (aorta.hang.last_calls)."""
    return f".rank_{rank}_calls"


def call_counts_name(rank: int) -> str:
    """The file that says how many collectives a rank has issued (aorta.hang.last_calls)."""
    return f".rank_{rank}_counts"


def unwritten_name(rank: int) -> str:
    """The file of a rank's steps that are timed and not written as records yet."""
    return f".rank_{rank}_unwritten"


def overhead_name() -> str:
    """The file of what recording was measured to cost, with which a restart goes on."""
    return ".overhead"


class FilesBeside(NamedTuple):
    """Files that a reader of a rank's lines needs as well."""

    kernels: Path
    unwritten: Path
    columns: Path


def files_beside(path: Path) -> FilesBeside | None:
    """Files beside a rank's step records at path; None for a file of another name."""
    named = STEPS_FILE.fullmatch(path.name)
    if named is None:
        return None
    rank = int(named[1])
    names = (kernels_name(rank), unwritten_name(rank), columns_name(rank))
    return FilesBeside(*map(path.with_name, names))

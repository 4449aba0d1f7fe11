"""Check that all ranks are about to do the same, before anything runs: a difference hangs a
device and silently adds up wrong numbers on gloo."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Communicate, Program
from aorta.timeline.collective import POINT_TO_POINT


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in the order of ranks. The host waits for all ranks of the group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def failures(problem: str | None, group: dist.ProcessGroup) -> dict[int, str]:
    """Texts of ranks that failed: rank -> text; empty where none did. The same on every rank."""
    return {rank: text for rank, text in enumerate(gathered(problem, group)) if text is not None}


def communications(program: Program, rank: int, sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """Communications that a rank will ask of its process groups, in order of issue.

    sizes: bytes of one tile of each buffer. A collective is (text,), the same on all ranks of a correct
    program. Point to point is (lane, sender, receiver, bytes), once per message of this rank.
    """
    rows: list[tuple[str, ...]] = []
    for step in program.unroll(rank):
        op = step.op
        if not isinstance(op, Communicate):
            continue
        if op.op not in POINT_TO_POINT:
            part = op.source or op.out
            assert part is not None
            text = f"{op.op}({part}) on {op.lane}, {sizes[part.name]} bytes"
            rows.append((text if op.root is None else f"{text} from rank {op.root}",))
            continue
        if op.source is not None and op.to is not None:
            rows.append((str(op.lane), str(rank), str(op.to), str(sizes[op.source.name])))
        if op.out is not None and op.by is not None:
            rows.append((str(op.lane), str(op.by), str(rank), str(sizes[op.out.name])))
    return rows


def refuse_mismatch(rows: Sequence[Sequence[tuple[str, ...]]]) -> None:
    """Raises HostProgramError where ranks would not meet; rows are communications() of all ranks.

    Collectives must be the same ones in the same order; every message must have both its ends.
    """
    collectives = [[row[0] for row in of_rank if len(row) == 1] for of_rank in rows]
    for rank, mine in enumerate(collectives):
        _compare(collectives[0], mine, rank)
    messages = [Counter(row for row in of_rank if len(row) == 4) for of_rank in rows]
    for sender, of_sender in enumerate(messages):
        for message, count in of_sender.items():
            partner = int(message[2]) if int(message[1]) == sender else int(message[1])
            if messages[partner][message] != count:
                lane, source, target, size = message
                raise HostProgramError(
                    f"ranks {source} and {target} disagree about messages of {size} bytes on {lane}:"
                    f" {count} on rank {sender}, {messages[partner][message]} on rank {partner}"
                    "; nothing was run"
                )


def _compare(first: list[str], mine: list[str], rank: int) -> None:
    for number, (a, b) in enumerate(zip(first, mine, strict=False)):
        if a != b:
            raise HostProgramError(
                f"ranks communicate in different orders: number {number} is {a} on rank 0"
                f" and {b} on rank {rank}; nothing was run"
            )
    if len(first) != len(mine):
        raise HostProgramError(
            f"rank 0 has {len(first)} collectives and rank {rank} has {len(mine)}; nothing was run"
        )

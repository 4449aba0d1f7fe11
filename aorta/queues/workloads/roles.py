"""Roles of streams."""

from collections.abc import Sequence


def deal_streams(num_streams: int, largest: Sequence[int], first: int = 0) -> list[list[int]]:
    """Streams first … num_streams−1 dealt to roles in turn, a role never more than `most` of it; neighbours
    in number have the same role.

    Each role needs a stream and every stream must find a role: the workload's range of streams says so.
    """
    counts = [0] * len(largest)
    left = num_streams - first
    assert len(largest) <= left <= sum(largest), f"{left} streams for roles of at most {list(largest)}"
    while left:
        for role, limit in enumerate(largest):
            if left and counts[role] < limit:
                counts[role] += 1
                left -= 1
    roles, start = [], first
    for count in counts:
        roles.append(list(range(start, start + count)))
        start += count
    return roles


def stage_stream(stage: int, item: int, num_stages: int, num_streams: int) -> int:
    """Stream of one stage of a pipeline for one item: stages have streams of their own, as many each as there
    are; with fewer streams than stages, stages share them."""
    num_rows = min(num_stages, num_streams)
    row = stage % num_rows
    num_of_row = (num_streams - row + num_rows - 1) // num_rows
    return row + num_rows * (item % num_of_row)

"""Reports of hangs as the watchdog writes them."""

from aorta.hang.report import GroupState, HangReport


def report(rank: int, *groups: GroupState, world_size: int = 2, num_steps: int = 6) -> HangReport:
    return HangReport(
        rank=rank,
        world_size=world_size,
        host="here",
        pid=100 + rank,
        written_unix_ns=0,
        reason="no step was begun for 9 s",
        step=num_steps - 1,
        num_steps=num_steps,
        since_s=9.0,
        limit_s=9.0,
        groups=list(groups),
        main_thread=[f"step (train.py:{10 + rank})"],
        device=None,
    )

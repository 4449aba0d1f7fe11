"""What `aorta run` says in the processes of its command."""

import sys

from aorta.launcher import rank_text


def say(message: str) -> None:
    """One line on stderr."""
    rank = rank_text()
    rank_note = "" if rank is None else f" (rank {rank})"
    try:
        sys.stderr.write(f"aorta{rank_note}: {message}\n")
        sys.stderr.flush()
    except Exception:
        pass

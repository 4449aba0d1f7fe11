"""Which rank the name of a file tells."""

import re
from pathlib import PurePath

RANK = r"(?:rank|worker)[-_]?(\d{1,6})(?!\d)"


def rank_in_name(where: str) -> int | None:
    """Of rank3.json, worker3_step_12.json or rank_3/trace.json; the file's own name comes before its
    folder's, which must say nothing else."""
    path = PurePath(where)
    found = re.findall(RANK, path.name)
    if found:
        return int(found[-1])
    folder = re.fullmatch(RANK, path.parent.name)
    return int(folder[1]) if folder else None

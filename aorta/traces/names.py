"""Names: which rank that of a file tells, and how names of a trace are listed in one line."""

import re
from collections.abc import Iterable
from pathlib import PurePath

MOST = 16
LONGEST = 60

RANK = r"(?:rank|worker)[-_]?(\d{1,6})(?!\d)"


def rank_in_name(location: str) -> int | None:
    """Of rank3.json, worker3_step_12.json or rank_3/trace.json; the file's own name comes before its
    folder's, which must say nothing else."""
    path = PurePath(location)
    numbers = re.findall(RANK, path.name)
    if numbers:
        return int(numbers[-1])
    folder = re.fullmatch(RANK, path.parent.name)
    return int(folder[1]) if folder else None


def listed_names(names: Iterable[object]) -> str:
    """Names that a trace gives, listed in one line whatever is in them."""
    listed = list(names)
    texts = ["".join(c if c.isprintable() else "?" for c in str(name)) for name in listed[:MOST]]
    shortened = [text if len(text) <= LONGEST else text[: LONGEST - 3] + "..." for text in texts]
    return ", ".join([*shortened, *(["..."] if len(listed) > MOST else [])])

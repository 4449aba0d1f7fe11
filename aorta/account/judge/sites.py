"""Who issues the collectives of a step, and what these move: places that were looked at in a few steps."""

from collections import defaultdict

import msgspec

from aorta.account.judge.profiles import sampled_ranks
from aorta.account.model import Run, once_of_run
from aorta.account.numbers import byte_text, often
from aorta.records.stacks import StackFrame

PARAMETERS = "parameters of "
"""What a gather for a module is written to move."""
ALIKE = {
    "gradients, bucket ": "gradients in {num} buckets",
    "gradients of ": "gradients of {num} modules",
    PARAMETERS: "parameters of {num} modules",
    "a tensor of ": "tensors of {num} modules",
}
"""What many calls of one place are written to move, by the beginning of that."""


class SiteRow(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one operation that one place issues, on one rank, a mean over the looked-at steps."""

    op: str
    moves: str
    file: str
    line: int
    function: str
    place: str
    """'train(), train.py:45'; of a library 'reduce_boolean_decision of lightning'."""
    is_program: bool
    per_step: float
    bytes_per_step: float
    ranks: list[int]
    """Those that have it alike, of the ranks that were read."""

    @property
    def text(self) -> str:
        """'all_reduce of gradients, bucket 0: head.weight in main(), train.py:50: 4 times a step, 8.0 MiB'"""
        if not self.bytes_per_step:
            return f"{self.op} in {self.place}: {self.often}"
        size = byte_text(self.bytes_per_step)
        of_what = self.moves if self.moves.startswith("for ") else f"of {self.moves}"
        return f"{self.op} {of_what} in {self.place}: {self.often}, {size}"

    @property
    def often(self) -> str:
        return often(self.per_step)

    @property
    def kind(self) -> str:
        """Of what it moves: 'gradients', 'parameters', 'buffers', 'a tensor', 'an object', 'a value'."""
        return self.moves.partition(",")[0].partition(" of ")[0]

    @property
    def is_bucket(self) -> bool:
        """Of gradients, as DistributedDataParallel reduces them."""
        return self.moves.startswith("gradients, bucket")


@once_of_run
def sites_of(judged: Run) -> list[SiteRow]:
    """Those that move most first; rows of several ranks that are alike are one."""
    if judged.sites is None:
        return []
    are_parameters = gathers_parameters(judged)
    rows: dict[tuple[str, str, str, float, float], tuple[SiteRow, list[int]]] = {}
    for rank in sampled_ranks(judged):
        told = judged.sites(rank)
        if told is None or told.num_steps < 1:
            continue
        for site in told.sites:
            row = SiteRow(
                op=site.op,
                moves=site.moves if are_parameters else site.moves.replace(PARAMETERS, "a tensor of ", 1),
                file=site.file,
                line=site.line,
                function=site.function,
                place=StackFrame(site.file, site.line, site.function, site.is_program).text,
                is_program=site.is_program,
                per_step=site.num_calls / told.num_steps,
                bytes_per_step=site.bytes / told.num_steps,
                ranks=[],
            )
            key = row.op, row.moves, row.place, row.per_step, row.bytes_per_step
            rows.setdefault(key, (row, []))[1].append(rank)
    found = [msgspec.structs.replace(row, ranks=ranks) for row, ranks in rows.values()]
    return sorted(found, key=lambda row: (-row.bytes_per_step, -row.per_step, row.place))


def site_texts(judged: Run) -> list[str]:
    """The same in words: what one place moves alike, as the buckets of a replica, is one text."""
    groups: dict[tuple[str, ...], list[SiteRow]] = defaultdict(list)
    for row in sites_of(judged):
        groups[row.op, row.place, row.often, next(filter(row.moves.startswith, ALIKE), row.moves)].append(row)
    return [text for _, text in sorted(map(_of_group, groups.items()), key=lambda entry: -entry[0])]


def _of_group(group: tuple[tuple[str, ...], list[SiteRow]]) -> tuple[float, str]:
    """Bytes of rows that are alike, and that in words."""
    (op, place, often, moves), (first, *others) = group
    size = first.bytes_per_step + sum(row.bytes_per_step for row in others)
    if not others or moves not in ALIKE:
        return size, first.text
    largest = f"{first.moves.removeprefix(moves.removesuffix('bucket '))}, {byte_text(first.bytes_per_step)}"
    what = ALIKE[moves].format(num=len(others) + 1)
    return size, f"{op} of {what} in {place}: {often} each, {byte_text(size)} (most: {largest})"


def gathers_parameters(judged: Run) -> bool:
    """Unless the program is known to have no units, and nothing reduces what units would: it gathers
    activations then, which are there no sooner."""
    program = judged.noted.program
    has_units = not program or bool(program.get("units"))
    return has_units or "exposed_ms.reduce_scatter" in judged.metrics

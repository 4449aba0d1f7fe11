"""Some of the samples of the ranks that stand for all: how long every rank is in what they show, and whether
as many, or as many on one rank, may be seen by chance."""

import math
import os
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import numpy as np

from aorta.account.judge.cells import Account
from aorta.account.judge.stacks import Samples, WeightedStack, innermost
from aorta.account.model import Run
from aorta.records.stacks import StackFrame
from aorta.timeline.arrays import Flags, Floats

Line = tuple[str, int]
"""Name of a file, and a line of it."""
Path = list[StackFrame]
"""Of a sample, the outermost frame first."""
Key = TypeVar("Key", bound=Hashable)
BY_CHANCE = 1.645
"""Standard deviations by which samples must show more than half of what is named: few of them are in a line
by chance."""
UNLIKE_RANKS = 0.05
"""Chance of samples of alike ranks differing as much: below it the rank with least of something has less."""


class Seen:
    def __init__(self, samples: Iterable[Samples], rows: Iterable[list[int]]) -> None:
        self.of = [*zip(samples, rows, strict=True)]
        """By rank, its samples and the rows of those that are meant."""

    @classmethod
    def where(cls, samples: list[Samples], which: Callable[[Samples], Flags]) -> "Seen":
        """Those of judged steps that a mask takes."""
        return cls(samples, (np.flatnonzero(one.is_judged & which(one)).tolist() for one in samples))

    def by(self, key: Callable[[Path], Key | None]) -> dict[Key, "Seen"]:
        """Those with each key, in order; not those with none."""
        found: dict[Key, Seen] = {}
        for rank, (one, rows) in enumerate(self.of):
            nodes = one.rows[rows, 5].tolist()
            keys = {node: key(one.stacks.path(node)) for node in set(nodes)}
            for row, node in zip(rows, nodes, strict=True):
                if (of := keys[node]) is not None:
                    if of not in found:
                        found[of] = Seen((one for one, _ in self.of), ([] for _ in self.of))
                    found[of].of[rank][1].append(row)
        return found

    def that(self, test: Callable[[Path], bool]) -> "Seen":
        nothing = Seen((one for one, _ in self.of), ([] for _ in self.of))
        return self.by(lambda path: test(path) or None).get(True, nothing)

    @property
    def num(self) -> int:
        return sum(len(rows) for _, rows in self.of)

    @property
    def fewest(self) -> int:
        """Of a rank."""
        return min((len(rows) for _, rows in self.of), default=0)

    @property
    def paths(self) -> list[Path]:
        return [one.path(row) for one, rows in self.of for row in rows]

    @property
    def first(self) -> StackFrame | None:
        """The innermost line of the program in the first of them."""
        return next(map(innermost, self.paths), None)

    @property
    def lines(self) -> set[Line]:
        """Of the program, that the threads were in."""
        return {line_of(frame) for path in self.paths for frame in path if frame.is_program}

    @property
    def stacks(self) -> list[WeightedStack]:
        return [stack for one, rows in self.of for stack in one.chosen(rows)]

    def shares(self) -> tuple[Floats, Floats]:
        """[rank]: the part of its samples' time in these; how many samples of one length tell as much."""
        ms = [one.ms[one.is_judged] for one, _ in self.of]
        inside = [float(one.ms[rows].sum()) for one, rows in self.of]
        whole, squares = np.array([each.sum() for each in ms]), np.array([(each**2).sum() for each in ms])
        return np.array(inside) / whole, whole**2 / squares

    def may_be_chance(self, share: float) -> bool:
        """Whether as many would be seen of what takes this share of the ranks' steps. Samples come more
        rarely as a run goes on: by their times a few late ones would outweigh all others."""
        num = sum(int(one.is_judged.sum()) for one, _ in self.of)
        error = math.sqrt(share * (1 - share) / num)
        return self.num / num < share + BY_CHANCE * error

    def are_alike(self) -> bool:
        """Whether the ranks' samples differ by no more than chance has it of ranks with the same share."""
        from scipy.special import chdtrc

        seen, num = self.shares()
        share = float((seen * num).sum() / num.sum())
        if len(seen) < 2 or not 0 < share < 1:
            return True
        differ = float((num * (seen - share) ** 2).sum()) / (share * (1 - share))
        return bool(chdtrc(len(seen) - 1, differ) >= UNLIKE_RANKS)

    def common_ms(self, whole: Run, account: Account) -> tuple[Floats, int]:
        """[step of the account]: as much as the rank that has least of it over the run, beyond chance, in
        each step. And how many samples tell it: few may be more or fewer by chance, but not so where nearly
        all are in it.

        whole: the run, of whose judged steps the samples are.
        """
        garbage = account.cells.get("garbage_collection", np.zeros_like(account.step_ms))
        length_ms = np.where(account.step_ms > 0, account.step_ms, np.inf)
        steps = whole.global_step[whole.judged_steps]
        order = np.argsort(steps)
        place = np.searchsorted(steps, account.global_step, sorter=order)
        collecting = np.full((len(self.of), len(steps)), np.nan)
        collecting[:, order[np.minimum(place, len(steps) - 1)]] = (garbage / length_ms)[: len(self.of)]
        seen, num = self.shares()
        by_rank = []
        for rank, (one, rows) in enumerate(self.of):
            # A stack does not show that garbage is collected in its innermost line; spans of the host do.
            of_rows = collecting[rank, one.column[rows]]
            is_known = np.isfinite(of_rows)  # a step that the account lacks is as the others of the group
            usual = float(of_rows[is_known].mean()) if is_known.any() else 0.0
            weights = one.ms[rows] * (1 - np.where(is_known, of_rows, usual))
            by_rank.append(float(weights.sum() / one.ms[one.is_judged].sum()))
        is_alike = self.are_alike()
        share = float(np.mean(by_rank) if is_alike else np.min(by_rank))
        told_by = seen * num / np.maximum(1 - seen, 1 / num)
        num_samples = round(float(told_by.sum() if is_alike else told_by.min()))
        return np.full(account.step_ms.shape[1], share * account.step_ms.mean()), num_samples


def line_of(frame: StackFrame | None) -> Line:
    return ("", 0) if frame is None else (os.path.basename(frame.file), frame.line)

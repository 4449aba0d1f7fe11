"""How the traces of a run are read: by which rules, whether from the cache, cut into which steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.files.cache import read_cached
from aorta.traces.model import RankTrace
from aorta.traces.sources import Source
from aorta.traces.steps import StepRule, with_steps


@dataclass(frozen=True, slots=True)
class Reading:
    """Travels to other processes."""

    rules: Sequence[CommRule] = COMM_RULES
    cache: bool = True
    steps: StepRule = StepRule()

    def read(self, source: Source, rank: int) -> RankTrace:
        """One rank's trace."""
        if self.cache:
            trace = read_cached(source, rank, rules=self.rules)
        else:
            trace = source.read(rank, rules=self.rules)
        return with_steps(trace, self.steps)

"""The ranks of one run of traces, matched by the order of their collectives."""

from collections.abc import Sequence

from aorta.account.load.traces.reduce import RankSummary
from aorta.errors import TraceError
from aorta.timeline.waits import RankView, match_ranks
from aorta.traces.sources import Source

EARLIEST_UNIX_NS = 10**18
"""September 2001: earlier times are of a clock that began with the machine or the trace."""
LONGEST_APART_NS = 3_600_000_000_000
"""Between ranks of one run; clocks of machines differ by less."""


def match_traces(source: Source, summaries: Sequence[RankSummary], *, are_all: bool = True) -> RankView:
    """The ranks matched. Groups that lack a rank have no waits. TraceError where the ranks did not run at the
    same time."""
    _check_times(source, summaries)
    return match_ranks([summary.calls for summary in summaries], are_all=are_all)


def _check_times(source: Source, summaries: Sequence[RankSummary]) -> None:
    """Ranks of one run run at the same time. Clocks of boots tell nothing of that."""
    ranks = [rank_facts.facts for rank_facts in summaries]
    if len(ranks) < 2 or min(rank_facts.start_unix_ns for rank_facts in ranks) < EARLIEST_UNIX_NS:
        return
    last, first = (
        max(ranks, key=lambda rank_facts: rank_facts.start_unix_ns),
        min(ranks, key=lambda rank_facts: rank_facts.end_unix_ns),
    )
    apart_ns = last.start_unix_ns - first.end_unix_ns
    if apart_ns > LONGEST_APART_NS:
        raise TraceError(
            f"{source.path} mixes runs: rank {last.rank} starts {apart_ns / 3.6e12:.1f} hours after rank"
            f" {first.rank} has ended; keep one run in a folder"
        )

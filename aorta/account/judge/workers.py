"""What the workers of a training loop's DataLoader do while the loop waits for a batch, as they sample it."""

from collections import defaultdict
from dataclasses import dataclass

from aorta.account.cause import CodeLine
from aorta.account.judge.stacks import FEWEST, MOST_RANKS, WeightedStack, heaviest, nested
from aorta.account.model import Run, once_of_run
from aorta.records.stacks import DOING, Doing, StackFrame
from aorta.records.workers import AWAITED, WORKER_STATES, WorkerChunk

MOST_OF_FETCHING = 0.8
"""Of what all iterators fetch, that those together have which are the loop's: others idle, or evaluate."""
ENOUGH = 10
"""Samples of workers that fetch while the loop waits, or of those that do not."""


LIMIT = 0.7
"""Workers that fetch at the mean moment in which the loop waits, from which on they are what it waits for."""


@dataclass(frozen=True, slots=True)
class LoaderWork:
    """Parts of the workers' time while the loop waits for a batch."""

    num_workers: int
    fetches: float
    hands_over: float
    waits: float
    lacks_cores: float
    """Of what they fetch, as workers that could run and do not."""
    sleeps: float
    """Of it, as workers that wait for something."""
    draws: bool | None
    """Whether random numbers were drawn for a batch; None: nobody looked."""
    stacks: list[WeightedStack]
    """Of what is fetched."""
    line: CodeLine | None
    """Line of the program that most of that is in; its ms and part are of what is fetched."""
    functions: list[StackFrame]
    """That call each other, most of it in each: the outermost first, without those above the line."""

    @property
    def num_fetching(self) -> float:
        """Workers, of the mean moment."""
        return self.fetches * self.num_workers

    @property
    def is_limit(self) -> bool:
        """The loop waits for what workers fetch."""
        return self.num_fetching >= LIMIT and len(self.stacks) >= ENOUGH

    def part_in(self, function: StackFrame) -> float:
        """Of what is fetched, that is in a function."""
        at, total = function.function_id, sum(one.ms for one in self.stacks)
        inside = [one.ms for one in self.stacks if any(frame.function_id == at for frame in one.frames)]
        return sum(inside) / total


@once_of_run
def loader_work(judged: Run, rank: int | None = None) -> LoaderWork | None:
    """Of one rank, or of all; None where nobody looked, or too few samples tell."""
    run = judged.whole
    if run.workers is None:
        return None
    ranks = run.ranks[:MOST_RANKS] if rank is None else [rank]
    found = [chunk for one in ranks for chunk in _of_the_loop(run.workers(one), run)]
    us = {state: sum(chunk.us_of(state) for chunk in found) for state in WORKER_STATES}
    awaited_us = sum(us.values())
    stacks, num_awaited = [], 0
    for chunk in found:
        for sample in chunk.samples:
            num_awaited += sample.num if sample.awaited == AWAITED else 0
            if sample.awaited == AWAITED and WORKER_STATES[sample.state] == "fetches":
                one = WeightedStack(
                    chunk.frames_of(sample), sample.us / 1e3 / sample.num, DOING[sample.doing]
                )
                stacks += [one] * sample.num
    if num_awaited < ENOUGH or not awaited_us:
        return None
    line = heaviest(stacks) if len(stacks) >= ENOUGH else None
    line = line if line is not None and line.num_samples >= FEWEST else None
    draws = [chunk.draws for chunk in found if chunk.draws is not None]
    return LoaderWork(
        num_workers=max(chunk.num_workers for chunk in found),
        fetches=us["fetches"] / awaited_us,
        hands_over=us["hands_over"] / awaited_us,
        waits=us["waits"] / awaited_us,
        lacks_cores=_part(stacks, "ready"),
        sleeps=_part(stacks, "sleeps"),
        draws=any(draws) if draws else None,
        stacks=stacks,
        line=line,
        functions=_functions(stacks, line) if len(stacks) >= ENOUGH else [],
    )


def _part(stacks: list[WeightedStack], doing: Doing) -> float:
    all_ms = sum(one.ms for one in stacks)
    return sum(one.ms for one in stacks if one.doing == doing) / all_ms if all_ms else 0.0


def _of_the_loop(chunks: list[WorkerChunk], run: Run) -> list[WorkerChunk]:
    """Lines of the loader that most batches were asked of, and of its iterators that fetch most."""
    rows = (run.noted.program or {}).get("loaders") or []
    with_workers = [row for row in rows if row.get("num_workers")]
    row = max(with_workers, key=lambda one: one.get("num_batches") or 0, default=None)
    if row is not None:
        told = row.get("dataset"), row.get("num_workers")
        chunks = [chunk for chunk in chunks if (chunk.dataset, chunk.num_workers) == told] or chunks
    by_iterator: dict[int, list[WorkerChunk]] = defaultdict(list)
    for chunk in chunks:
        by_iterator[chunk.iterator].append(chunk)
    fetched = {
        key: sum(chunk.us_of("fetches", "hands_over") for chunk in some) for key, some in by_iterator.items()
    }
    found: list[WorkerChunk] = []
    left = MOST_OF_FETCHING * sum(fetched.values())
    for key in sorted(fetched, key=lambda one: -fetched[one]):
        if left <= 0 and found:
            break
        found += by_iterator[key]
        left -= fetched[key]
    return found


def _functions(stacks: list[WeightedStack], line: CodeLine | None) -> list[StackFrame]:
    """Functions below the line that call each other, as far as most is in each; without a line those below
    the loop."""
    inside = [(one, place) for one in stacks if (place := _place(one, line)) is not None]
    groups = nested(inside, sum(one.ms for one in stacks), lambda frame: True)
    return [stack.frames[place] for (stack, place), *_ in groups]


def _place(stack: WeightedStack, line: CodeLine | None) -> int | None:
    """Of the line's frame, -1 without a line; None where it is not in the line's function."""
    if line is None:
        return -1
    at = (line.file, line.function)
    places = (place for place, frame in enumerate(stack.frames) if frame.function_id == at)
    return max(places, default=None)

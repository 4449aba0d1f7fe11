"""Strategies that copy into the peers' memory: neither copies nor signals occupy a compute unit.

A collective's kernel shares the compute units with the multiply; a copy engine shares only memory and links.
Each rank pushes its own rows to the peers, piece by piece, and signals each piece; a stream waits for the
signal and multiplies. The part that needs no communication is multiplied first (gather) or last (scatter),
so that it hides the beginning or the end of the transfer.

Who waits for whom between calls: buffers that peers write come in pairs, used in turn. A rank pushes into a
peer's buffer of call t only after its own call t-1 ended, for which it had all signals of that peer's call
t-1, which that peer sent after its call t-2 ended and what it had queued behind it. So nobody overwrites
rows that are still read, without a barrier; a result must be read by work queued before the next call but
one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pipelining.peers import Peers, SymmetricBuffer

from aorta.device.streams import MAIN
from aorta.programs.execute.strategies import (
    Strategy,
    StrategyBench,
    StrategyUnavailable,
    poison,
)
from aorta.programs.language.expr import HostProgramError

Action = Callable[[], None]
Route = Literal["pairwise", "ring"]


class CopyEngine(Strategy):
    """Base of both strategies: a copy stream beside the caller's, and signals."""

    def __init__(self, bench: StrategyBench, peers: Peers, **settings: int | str) -> None:
        super().__init__(bench, **settings)
        if bench.problem.num_ranks < 2:
            raise StrategyUnavailable("one rank has no peer to copy to")
        self.streams, self.peers = bench.streams, peers
        self.copies = bench.num_workers  # the stream behind the workers
        self.signals: Any = None
        self.ranks = bench.problem.num_ranks
        self.rank = bench.rank
        self.calls = 0

    def _buffer(self, name: str, *shape: int) -> SymmetricBuffer:
        """Buffer that strategies use in turns."""
        with _needing_peers():
            return self.peers.symmetric(name, shape)

    def _make_signals(self, num_slots: int) -> Any:
        with _needing_peers():
            return self.peers.signals(num_slots)

    def _begin(self) -> int:
        """Begin a call; returns the half, 0 or 1, of the pairs of buffers that it uses."""
        self.signals.begin()
        half = self.calls % 2
        self.calls += 1
        # The caller wrote the rows on MAIN; and its previous call must be over before peers are written to.
        self._follow(self.copies, MAIN)
        return half

    def _follow(self, stream: int, leader: int) -> None:
        """Make later work of stream follow everything that leader holds now."""
        self.streams.wait(stream, self.streams.record(leader))

    def _wait(self, sender: int, slot: int) -> Action:
        return lambda: self.signals.wait(MAIN, sender, slot)

    def _multiply(self, work: Action) -> None:
        self.streams.submit(MAIN, work)


class GatherByCopy(CopyEngine):
    """All-gather + multiply: pushes own rows to every peer, multiplies them, then those that arrive."""

    name = "copy engine"

    def __init__(
        self,
        bench: StrategyBench,
        peers: Peers,
        chunks: int,
        *,
        taper: bool = False,
        route: Route = "pairwise",
    ) -> None:
        """chunks: pieces of the last shard to arrive; earlier ones come in one or two.

        A ring passes on the pieces that it received, so that all its shards are cut alike.
        """
        super().__init__(bench, peers, route=route, chunks=chunks, **({"taper": 1} if taper else {}))
        problem = bench.problem
        last = chunk_rows(problem.shard_rows, chunks, taper)
        earlier = last if route == "ring" else chunk_rows(problem.shard_rows, min(chunks, 2))
        self.route = route
        self.pieces = [earlier] * (self.ranks - 2) + [last]
        self.num_pieces = max(len(rows) for rows in self.pieces)
        shape = (self.ranks, problem.shard_rows, problem.k)
        self.gathered = [self._buffer(f"G{half}", *shape) for half in (0, 1)]
        self.out = bench.arena.tensor("C", (self.ranks, problem.shard_rows, problem.n))
        self.signals = self._make_signals((self.ranks - 1) * self.num_pieces)
        operands = bench.operands
        self._own_product = _product(operands.a, operands.w, self.out[self.rank])
        # Views once, here: making them costs the host more than the copy does.
        self._pushes = [list(self._push_actions(half)) for half in (0, 1)]
        self._arrivals = [list(self._arrival_actions(half)) for half in (0, 1)]

    def submit(self) -> None:
        half = self._begin()
        pushes = self._pushes[half]
        # The first push goes out before the long launch of the multiply, the others behind it: the device
        # is busy with both by then. All pushes precede all waits, so that one hardware queue suffices.
        pushes[0]()
        self._multiply(self._own_product)
        for push in pushes[1:]:
            push()
        for wait, multiply in self._arrivals[half]:
            wait()
            self._multiply(multiply)
        self._join()

    def result(self) -> torch.Tensor:
        return self.out.view(-1, self.bench.problem.n)

    def poison(self) -> None:
        poison(self.out, *(buffer.local for buffer in self.gathered))

    def _push_actions(self, half: int) -> Iterator[Action]:
        operands, buffers = self.bench.operands, self.gathered[half].of_rank
        for step, pieces in enumerate(self.pieces, start=1):
            by_ring = self.route == "ring" and step > 1
            shard = (self.rank - step + 1) % self.ranks if by_ring else self.rank
            peer = (self.rank + (1 if self.route == "ring" else step)) % self.ranks
            for number, (first, end) in enumerate(pieces):
                source = buffers[self.rank][shard] if by_ring else operands.a
                slot = self._slot(step, number)
                forwarded = (self._source(step - 1), self._slot(step - 1, number)) if by_ring else None
                yield self._push(buffers[peer][shard][first:end], source[first:end], peer, slot, forwarded)

    def _push(
        self, out: torch.Tensor, source: torch.Tensor, peer: int, slot: int, forwarded: tuple[int, int] | None
    ) -> Action:
        copies, copy = self.copies, _copy(out, source)

        def push() -> None:
            if forwarded is not None:
                self.signals.wait(copies, *forwarded)
            self.streams.submit(copies, copy)
            self.signals.put(copies, peer, slot)

        return push

    def _arrival_actions(self, half: int) -> Iterator[tuple[Action, Action]]:
        local, weights = self.gathered[half].local, self.bench.operands.w
        for step, pieces in enumerate(self.pieces, start=1):
            # The rank whose rows these are; by a ring they come through the neighbour.
            shard = (self.rank - step) % self.ranks
            for number, (first, end) in enumerate(pieces):
                wait = self._wait(self._source(step), self._slot(step, number))
                yield wait, _product(local[shard][first:end], weights, self.out[shard][first:end])

    def _source(self, step: int) -> int:
        """Rank whose signal says that the shard of a step is here."""
        return (self.rank - (1 if self.route == "ring" else step)) % self.ranks

    def _slot(self, step: int, number: int) -> int:
        return (step - 1) * self.num_pieces + number

    def _join(self) -> None:
        # The caller may write its rows again only when they are all sent.
        self._follow(MAIN, self.copies)


class ReduceByCopy(CopyEngine):
    """Multiply + reduce-scatter or all-reduce: partial sums travel round the ring and grow on the way.

    Step j multiplies the rows of rank (r - 1 - j) into the sum that arrived for them, in place (the multiply
    adds with its own epilogue), and pushes the sum on; the last step makes this rank's own rows. For an
    all-reduce these are then pushed to everybody.
    """

    name = "copy engine ring"
    note = "C lies in symmetric memory; read it before the next call but one"

    def __init__(self, bench: StrategyBench, peers: Peers, chunks: int) -> None:
        super().__init__(bench, peers, chunks=chunks)
        problem = bench.problem
        self.spreads = problem.op == "gemm_ar"
        rows, columns = problem.shard_rows, problem.n
        self.pieces = chunk_rows(rows, chunks)
        self.first = bench.arena.tensor("P", (rows, columns))
        outputs = (self.ranks, rows, columns) if self.spreads else (1, rows, columns)
        self.outputs = [self._buffer(f"C{half}", *outputs) for half in (0, 1)]
        hops = (self.ranks - 2, rows, columns)
        self.hops = [self._buffer(f"hop{half}", *hops) for half in (0, 1)] if self.ranks > 2 else []
        self.signals = self._make_signals(self.ranks * len(self.pieces))
        self._steps = [list(self._step_actions(half)) for half in (0, 1)]
        self._spreads = [list(self._spread_actions(half)) for half in (0, 1)]

    def submit(self) -> None:
        half = self._begin()
        for wait, product, push in self._steps[half]:
            if wait is not None:
                wait()
            self._multiply(product)
            for send in push:
                send()
        if self.spreads:
            for wait in self._spreads[half]:
                wait()
        # The operands and sums may be written again only when they are all sent.
        self._follow(MAIN, self.copies)

    def result(self) -> torch.Tensor:
        return self.outputs[(self.calls - 1) % 2].local.view(-1, self.bench.problem.n)

    def poison(self) -> None:
        poison(self.first, *(buffer.local for buffer in [*self.outputs, *self.hops]))

    def _step_actions(self, half: int) -> Iterator[tuple[Action | None, Action, list[Action]]]:
        """Actions of every piece of every step: wait for the sum so far, add this rank's part, send it on."""
        operands = self.bench.operands
        previous, following = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        rows_of = self.bench.problem.shard_rows
        for step in range(self.ranks):
            rank = (self.rank - 1 - step) % self.ranks
            a = operands.a[rank * rows_of : (rank + 1) * rows_of]
            local = self.first if step == 0 else self._arrival(half, step, self.rank)
            for number, (first, end) in enumerate(self.pieces):
                slot = self._slot(step, number)
                wait = None if step == 0 else self._wait(previous, slot)
                product = _product(a[first:end], operands.w, local[first:end], add=step > 0)
                push = []
                if step < self.ranks - 1:
                    remote = self._arrival(half, step + 1, following)[first:end]
                    push = [self._push(remote, local[first:end], following, self._slot(step + 1, number))]
                elif self.spreads:
                    push = list(self._spread(half, number, first, end))
                yield wait, product, push

    def _spread(self, half: int, number: int, first: int, end: int) -> Iterator[Action]:
        """Actions that push own rows, now complete, to all, the nearest first, so that no two target one."""
        of_rank = self.outputs[half].of_rank
        source = of_rank[self.rank][self.rank][first:end]
        for distance in range(1, self.ranks):
            peer = (self.rank + distance) % self.ranks
            yield self._push(of_rank[peer][self.rank][first:end], source, peer, self._slot(0, number))

    def _spread_actions(self, half: int) -> Iterator[Action]:
        for number in range(len(self.pieces)):
            for distance in range(1, self.ranks):
                yield self._wait((self.rank - distance) % self.ranks, self._slot(0, number))

    def _arrival(self, half: int, step: int, owner: int) -> torch.Tensor:
        """Buffer of the sum that a rank continues in a step; in the last step the result itself."""
        if step < self.ranks - 1:
            return self.hops[half].of_rank[owner][step - 1]
        return self.outputs[half].of_rank[owner][owner if self.spreads else 0]

    def _slot(self, step: int, number: int) -> int:
        """Slot of a piece. Nothing is sent for step 0: its slots serve the spread."""
        return step * len(self.pieces) + number

    def _push(self, out: torch.Tensor, source: torch.Tensor, peer: int, slot: int) -> Action:
        copies, copy = self.copies, _copy(out, source)

        def push() -> None:
            self._follow(copies, MAIN)  # the multiply has written the source
            self.streams.submit(copies, copy)
            self.signals.put(copies, peer, slot)

        return push


def chunk_rows(rows: int, num: int, taper: bool = False, multiple: int = 256) -> list[tuple[int, int]]:
    """Bounds [first, end) of num pieces of consecutive rows, cut at multiples where there are rows enough.

    taper: each piece has half of the rows left, the last two alike: few multiplies, and a short last one.
    """
    num = min(num, rows)
    shares = [0.5 ** min(i + 1, num - 1) for i in range(num)] if taper else [1 / num] * num
    step = multiple if rows >= multiple * num * (2 if taper else 1) else 1
    ends, reached = [], 0.0
    for share in shares:
        reached += share
        ends.append(round(reached * rows / step) * step)
    ends[-1] = rows
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    return [(first, end) for first, end in pieces if end > first]


def _product(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, add: bool = False) -> Action:
    """Action out = a @ w, or with add out += a @ w, without another pass over memory."""

    def multiply() -> None:
        if add:
            out.addmm_(a, w)
        else:
            torch.mm(a, w, out=out)

    return multiply


def _copy(out: torch.Tensor, source: torch.Tensor) -> Action:
    def copy() -> None:
        out.copy_(source)

    return copy


@contextmanager
def _needing_peers() -> Iterator[None]:
    """Context in which missing access to the peers' memory becomes StrategyUnavailable."""
    try:
        yield
    except (HostProgramError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        raise StrategyUnavailable(lines[0] if lines else type(error).__name__) from None

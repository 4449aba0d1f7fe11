"""Programs taken apart: slices of one kind alone, beside the other kind, and tile after tile.

What benchmarks/pipelining.py measures beside the programs themselves, to explain their times and to calibrate
the simulator.
"""

from collections.abc import Callable, Iterator
from typing import Any

from aorta.device.streams import MAIN
from aorta.programs.execute.executor import Execution, wait_all
from aorta.programs.language.ir import Communicate, Gemm, Record, Step, Wait, WaitWork

Action = Callable[[], None]
MOST_REPEATS = 6


class Slices(Execution):
    """The program of another execution on its tensors, streams and groups. Construction is collective."""

    def __init__(self, execution: Execution, side: int, control: Any) -> None:
        """side: a stream that the program does not use."""
        super().__init__(
            execution.program, execution.tensors, execution.streams, execution.groups, control=control
        )
        self.side = side
        self._comm = self._compiled(self._without(Gemm))
        self._gemm_actions = self._compiled(self._without(Communicate, WaitWork))
        self._chain = list(self._chained())
        self._multiplies = [self._gemm(step.op) for step in self.steps if isinstance(step.op, Gemm)]

    def comm(self) -> None:
        """The program's communication and dependencies, without its multiplies."""
        for action in self._comm:
            action()

    def gemm(self) -> None:
        """The program's multiplies and dependencies, without its communication."""
        for action in self._gemm_actions:
            action()

    def chained(self) -> None:
        """The same work on the same streams, but tile after tile: each tile's stream waits for the one before
        it, by explicit events that pass through the side stream.

        Nothing can overlap, and there are as many edges between streams as with fork and join in the loop.
        Submitted behind MAIN and joined into it; the program's own records and waits are left out.
        """
        for action in self._chain:
            action()

    def beside_comm(self, times: int) -> None:
        """The multiplies on MAIN while all communication runs `times` times elsewhere."""
        self.streams.wait(self.side, self.streams.record(MAIN))
        for _ in range(times):
            self._communicate_on(self.side)
        for work in self._multiplies:
            self.streams.submit(MAIN, work)

    def beside_gemm(self, times: int) -> None:
        """The communication, awaited by MAIN, while the multiplies run `times` times elsewhere."""
        self.streams.wait(self.side, self.streams.record(MAIN))
        for work in self._multiplies * times:
            self.streams.submit(self.side, work)
        self._communicate_on(MAIN)

    def _without(self, *kinds: type) -> list[Step]:
        return [step for step in self.steps if not isinstance(step.op, kinds)]

    def _communicate_on(self, stream: int) -> None:
        """Issues every communication from one stream, which then waits for all of them."""
        issued = [self._issued_on(step.op, stream) for step in self.steps if isinstance(step.op, Communicate)]
        for work in issued:
            self._wait_work(stream, work)

    def _issued_on(self, op: Communicate, stream: int) -> Any:
        launch = self._launch(op)
        if self.streams.kind == "threads":
            return self._run_on_lane(op.lane, stream, lambda: wait_all(launch(False)))
        issued: list[Any] = []
        self.streams.submit(stream, lambda: issued.append(launch(True)))
        return issued[0]

    def _chained(self) -> Iterator[Action]:
        opens: type | None = None
        previous = MAIN
        for step in self._without(Record, Wait):
            action = self._action(step)
            if action is None:
                continue
            opens = opens or type(step.op)
            if isinstance(step.op, opens):
                stream = self.stream_numbers[step.stream]
                if previous != MAIN:
                    yield self._following(self.side, previous)
                    previous = self.side
                yield self._following(stream, previous)
                previous = stream
            yield action
        yield self._following(MAIN, previous)

    def _following(self, stream: int, leader: int) -> Action:
        return lambda: self.streams.wait(stream, self.streams.record(leader))


def repeated(submit: Callable[[int], None], of_ms: float, other_ms: float) -> Callable[[], None]:
    """The other kind often enough to go on for as long as the measured one; the same count on all ranks
    that have the same times."""
    times = min(int(of_ms / max(other_ms, 1e-6)) + 2, MOST_REPEATS)
    return lambda: submit(times)

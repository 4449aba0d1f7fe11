"""Streams, events and lanes as a machine that is run one item at a time, in any legal order.

It knows nothing of graphs: a stream is a queue, an event is how much of a stream there was when it was
recorded, and a wait stands in its queue until that much is done. Operations are given by number.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aorta.programs.language.ir import Communicate, Gemm, Program, Record, UserOp, Wait, WaitWork


@dataclass
class Item:
    number: int | None = None
    """Of the operation; None for a wait."""
    until: tuple[str, int] | None = None
    """Stream, and how many of its items must be done."""


@dataclass
class Streams:
    queues: dict[str, list[Item]] = field(default_factory=lambda: defaultdict(list))
    operations: list[object] = field(default_factory=list)
    needs: dict[int, set[int]] = field(default_factory=dict)
    """Operations that must have run before an operation, besides what the queues say."""

    @classmethod
    def of(cls, program: Program, rank: int = 0, events: bool = True) -> "Streams":
        """Operation 0 is the caller's work before, the last one the caller's work after.

        Without events only a stream's waits for communication that it issued itself are left.
        """
        streams, recorded, works = cls(), {}, {}
        main = program.main_stream()
        streams.put(main, "begin")
        for step in program.unroll(rank):
            match step.op:
                case Record(event=event, stream=stream):
                    where = str(stream) if stream is not None else step.stream
                    recorded[event] = (where, len(streams.queues[where]))
                case Wait(event=event):
                    if events and event in recorded:
                        streams.queues[step.stream].append(Item(until=recorded[event]))
                case WaitWork(work=work):
                    until, issuer = works[work]
                    if events or issuer == step.stream:
                        streams.queues[step.stream].append(Item(until=until))
                case Communicate(work=work, lane=lane) if work is not None:
                    issued = (step.stream, len(streams.queues[step.stream]))
                    streams.put(str(lane), step.op, until=issued)
                    works[work] = (str(lane), len(streams.queues[str(lane)])), step.stream
                case Communicate() | Gemm() | UserOp():
                    streams.put(step.stream, step.op)
        streams.put(main, "end")
        return streams

    def put(self, stream: str, operation: object, until: tuple[str, int] | None = None) -> None:
        self.queues[stream].append(Item(number=len(self.operations), until=until))
        self.operations.append(operation)

    def run(self, choose: Callable[[Sequence[Item]], int]) -> list[int]:
        """Operation numbers in the order in which they ran; choose picks among the items that may go."""
        done = dict.fromkeys(self.queues, 0)
        ran: list[int] = []
        while True:
            ready = [
                (name, queue[done[name]])
                for name, queue in self.queues.items()
                if done[name] < len(queue)
                and _passed(queue[done[name]].until, done)
                and self.needs.get(queue[done[name]].number, set()) <= set(ran)
            ]
            if not ready:
                assert all(done[name] == len(queue) for name, queue in self.queues.items()), "stuck"
                return ran
            name, item = ready[choose([item for _, item in ready])]
            done[name] += 1
            if item.number is not None:
                ran.append(item.number)

    def can_run_before(self, late: int, early: int) -> bool:
        """Whether `early` can run while `late` has not: late is put off as long as anything else can go."""

        def avoid(ready: Sequence[Item]) -> int:
            return next((at for at, item in enumerate(ready) if item.number != late), 0)

        ran = self.run(avoid)
        return ran.index(early) < ran.index(late)


def _passed(until: tuple[str, int] | None, done: dict[str, int]) -> bool:
    return until is None or done[until[0]] >= until[1]

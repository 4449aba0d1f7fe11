"""Host programs as plain data: the instructions by which a host fills streams and process groups.

A program is one text for all ranks: indices may use `rank` and `ranks`. Loops stay loops until
`Program.unroll` gives the instructions of one rank in the order in which the host issues them.

Who waits for whom
- Work of one stream runs in the order of issue.
- `Record` captures what its stream holds *when the host records*, waits that were queued there
  included; `Wait` makes the current stream wait for the latest record of that event so far.
- A `Communicate` with a work name is asynchronous: it runs on its lane (the stream of a process
  group), after what was on the issuing stream and after everything issued on the lane before it.
  `WaitWork` makes the current stream, not the host, wait for it. Without a work name it runs on
  the current stream itself, as a synchronous collective does in torch since 2.8.
- Before the program the caller wrote the inputs on the stream that is current then; after it the
  caller reads the outputs on that stream. Nothing else orders them with the program.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from aorta.programs.language.expr import Expr, HostProgramError, Index, evaluate

Role = Literal["input", "output", "scratch"]
CommOp = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv", "send_recv"
]
COMM_OPS: tuple[str, ...] = get_args(CommOp)


@dataclass(frozen=True, slots=True)
class Ref:
    """Name, with an index if it has one, of a stream, event, work, lane, or part of a buffer.

    In a part of a buffer a shorter index means everything below it: G is the whole buffer, and G[1]
    contains G[1, 0].
    """

    name: str
    index: tuple[Index, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.index))}]" if self.index else self.name

    def overlaps(self, reference: "Ref") -> bool:
        """True if two parts share memory. Both must be unrolled (integers only)."""
        return self.name == reference.name and all(
            a == b for a, b in zip(self.index, reference.index, strict=False)
        )

    def at(self, variables: dict[str, int]) -> "Ref":
        """The reference with integers for its indices."""
        return Ref(self.name, tuple(evaluate(i, variables) for i in self.index)) if self.index else self


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction."""

    line: int = field(default=0, compare=False, kw_only=True)
    """Line of the text; 0 for an instruction that was built and not read."""
    READS: ClassVar[tuple[str, ...]] = ()
    WRITES: ClassVar[tuple[str, ...]] = ()
    """Fields that name the parts of buffers which it reads and writes."""

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self._parts(self.READS)

    @property
    def writes(self) -> tuple[Ref, ...]:
        return self._parts(self.WRITES)

    def _parts(self, names: tuple[str, ...]) -> tuple[Ref, ...]:
        parts = (getattr(self, name) or () for name in names)
        return tuple(ref for part in parts for ref in ((part,) if isinstance(part, Ref) else part))


@dataclass(frozen=True, slots=True)
class GetCurrentStream(Op):
    """Name the stream that is current, normally the caller's: `main = current_stream()`."""

    name: str


@dataclass(frozen=True, slots=True)
class SetStream(Op):
    """Make a stream current. A name that was not bound is a new stream of the program."""

    stream: Ref


@dataclass(frozen=True, slots=True)
class Record(Op):
    """Let the event mean everything that the stream (None: the current one) holds at this point."""

    event: Ref
    stream: Ref | None = None


@dataclass(frozen=True, slots=True)
class Wait(Op):
    """Make the current stream wait for the event as it was last recorded."""

    event: Ref


@dataclass(frozen=True, slots=True)
class Allocate(Op):
    """Make a buffer of tiles: () is one piece, (8,) eight tiles, (2, 4) two rings of four slices.

    Inputs hold data before the program starts, outputs are read after it; scratch is neither.
    """

    name: str
    tiles: tuple[int, ...] = ()
    role: Role = "scratch"


@dataclass(frozen=True, slots=True)
class Select(Op):
    """Give a part of a buffer another name, until that name is bound again."""

    name: str
    source: Ref


@dataclass(frozen=True, slots=True)
class Communicate(Op):
    """Run a collective or point-to-point operation of the process group `lane`.

    source is read and out is written; in place where they are the same. send has no out, recv no
    source; send_recv posts both as one. `to` and `by` are the ranks sent to and received from, root
    belongs to broadcast. Reductions add.
    """

    op: CommOp
    source: Ref | None
    out: Ref | None
    lane: Ref
    work: Ref | None = None
    """None: synchronous, on the current stream."""
    to: Index | None = None
    by: Index | None = None
    root: Index | None = None
    cost_us: float | None = None
    READS, WRITES = ("source",), ("out",)


@dataclass(frozen=True, slots=True)
class WaitWork(Op):
    """Make the current stream wait for the end of an asynchronous communication."""

    work: Ref


@dataclass(frozen=True, slots=True)
class Gemm(Op):
    """Compute out = a @ b (+ bias); with transposed out = a @ b.T (+ bias), which is torch's linear."""

    a: Ref
    b: Ref
    out: Ref
    bias: Ref | None = None
    transposed: bool = False
    cost_us: float | None = None
    READS, WRITES = ("a", "b", "bias"), ("out",)


@dataclass(frozen=True, slots=True)
class UserOp(Op):
    """Do any other work on the current stream; a part that is read and written is in both lists."""

    name: str
    inputs: tuple[Ref, ...] = ()
    outputs: tuple[Ref, ...] = ()
    cost_us: float | None = None
    READS, WRITES = ("inputs",), ("outputs",)


@dataclass(frozen=True, slots=True)
class Loop(Op):
    """Run the body once per value of the variable, start included, stop not."""

    variable: str
    start: Index
    stop: Index
    body: tuple[Op, ...]


class Step(NamedTuple):
    """Instruction as the host issues it: integers only, no loops, no selections."""

    op: Op
    stream: str
    """Stream that is current when it is issued; for a SetStream the one that becomes current."""
    iteration: tuple[tuple[str, int], ...] = ()
    """Values of the loop variables, outermost first."""


MAX_STEPS = 100_000
"""Most steps of an unrolled program: beyond it a loop bound is a mistake."""

CALLER_STREAM = "caller"
"""Name of the stream that is current at the start, until current_stream() names it."""


@dataclass(frozen=True, slots=True)
class Program:
    """A host program for a number of ranks. params say how it was emitted, for readers only."""

    name: str
    num_ranks: int
    body: tuple[Op, ...]
    params: tuple[tuple[str, int | str], ...] = ()

    def buffers(self) -> dict[str, Allocate]:
        """Buffers by name; they are allocated outside loops."""
        return {op.name: op for op in self.body if isinstance(op, Allocate)}

    def main_stream(self) -> str:
        """Name of the caller's stream in the program."""
        for op in self.body:
            if isinstance(op, GetCurrentStream):
                return op.name
            if isinstance(op, SetStream):
                break
        return CALLER_STREAM

    def unroll(self, rank: int = 0) -> tuple[Step, ...]:
        """The instructions of one rank in order of issue.

        Raises HostProgramError, with the line where there is one, for a variable, buffer or index
        that does not exist, and for a rank outside 0 .. num_ranks - 1.
        """
        if not 0 <= rank < self.num_ranks:
            raise HostProgramError(f"rank {rank} of a program for {self.num_ranks} ranks")
        steps = tuple(islice(_Unroller(self, rank).steps(self.body, ()), MAX_STEPS + 1))
        if len(steps) > MAX_STEPS:
            raise HostProgramError(f"the loops unroll to more than {MAX_STEPS:,} instructions")
        return steps


class _Unroller:
    """Steps of one rank, loop by loop, with the current stream and selections as they are at each."""

    def __init__(self, program: Program, rank: int) -> None:
        self.buffers = program.buffers()
        self.constants = {"rank": rank, "ranks": program.num_ranks}
        self.num_ranks = program.num_ranks
        self.current = program.main_stream()
        self.selected: dict[str, Ref] = {}

    def steps(self, body: tuple[Op, ...], iteration: tuple[tuple[str, int], ...]) -> Iterator[Step]:
        variables = self.constants | dict(iteration)
        for op in body:
            try:
                if isinstance(op, Loop):
                    start, stop = evaluate(op.start, variables), evaluate(op.stop, variables)
                    for value in range(start, stop):
                        yield from self.steps(op.body, (*iteration, (op.variable, value)))
                    continue
                yield from self.step(op, variables, iteration)
            except HostProgramError as error:
                raise _at_line(error, op.line) from None

    def step(
        self, op: Op, variables: dict[str, int], iteration: tuple[tuple[str, int], ...]
    ) -> Iterator[Step]:
        if isinstance(op, Select):
            self.selected[op.name] = self.part(op.source.at(variables))
            return
        op = _evaluated(op, variables)
        match op:
            case SetStream(stream=stream):
                self.current = str(stream)
            case GetCurrentStream(name=name):
                if name != self.current:
                    raise HostProgramError(f"{name} would be a second name of stream {self.current}")
            case Communicate() | Gemm() | UserOp():
                op = _with_parts(op, self.part)
                if isinstance(op, Communicate):
                    self.check_peers(op)
        yield Step(op, self.current, iteration)

    def part(self, ref: Ref) -> Ref:
        """Part of a buffer that a reference means, selections followed."""
        base = self.selected.get(ref.name)
        full = Ref(base.name, base.index + ref.index) if base is not None else ref
        buffer = self.buffers.get(full.name)
        if buffer is None:
            raise HostProgramError(f"{full.name} is not a buffer: input, output or allocate it first")
        inside = all(
            isinstance(i, int) and 0 <= i < size for i, size in zip(full.index, buffer.tiles, strict=False)
        )
        if len(full.index) > len(buffer.tiles) or not inside:
            shape = ", ".join(map(str, buffer.tiles)) or "no index"
            raise HostProgramError(f"{full} is outside {full.name}({shape})")
        return full

    def check_peers(self, op: Communicate) -> None:
        for peer in (op.to, op.by, op.root):
            if isinstance(peer, int) and not 0 <= peer < self.num_ranks:
                raise HostProgramError(f"{op.op}: rank {peer} of {self.num_ranks} does not exist")


def _evaluated(op: Op, variables: dict[str, int]) -> Op:
    """The instruction with integers for its indices."""
    changes: dict[str, Any] = {}
    for f in fields(op):
        value = getattr(op, f.name)
        match value:
            case Ref() if value.index:
                changes[f.name] = value.at(variables)
            case Expr():
                changes[f.name] = evaluate(value, variables)
            case (Ref(), *_):
                changes[f.name] = tuple(ref.at(variables) for ref in value)
    return replace(op, **changes) if changes else op


def _with_parts(op: Op, part: Callable[[Ref], Ref]) -> Op:
    """The operation with part() applied to everything that it reads and writes."""
    changes: dict[str, Any] = {}
    for name in op.READS + op.WRITES:
        value = getattr(op, name)
        if isinstance(value, Ref):
            changes[name] = part(value)
        elif value is not None:
            changes[name] = tuple(part(ref) for ref in value)
    return replace(op, **changes)


def _at_line(error: HostProgramError, line: int) -> HostProgramError:
    text = str(error)
    return error if not line or text.startswith("line ") else HostProgramError(f"line {line}: {text}")

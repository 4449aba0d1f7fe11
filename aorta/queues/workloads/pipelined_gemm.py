"""A matrix multiply overlapped with its collective, tile by tile, as a host program of aorta.programs."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from aorta.device.streams import StreamEvent
from aorta.programs.language.emit import Shape, emit, emit_named
from aorta.programs.language.ir import Communicate, Gemm, Program, Record, Ref, Step, Wait, WaitWork
from aorta.queues.options import Help, at_least_one
from aorta.queues.workload import Amount, DeviceWork, WorkloadOptions
from aorta.queues.workloads.communication import Lane, make_lanes
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    product_comparison,
)

Order = Literal["factorized", "developed", "join_hoisted", "both_hoisted"]
Operation = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
DEFAULT_TILES = 16
ROWS_PER_TILE_AND_RANK = {"full": 8192, "small": 8}
INNER = {"full": 4096, "small": 32}
COLUMNS = {"full": 2048, "small": 16}
CALLER = 0


class PipelinedGemmOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    emission_order: Annotated[Order, Help("where fork and join stand")] = "factorized"
    op: Annotated[Operation, Help("what is overlapped")] = "ag_gemm"
    tiles: Annotated[int, Help("pieces of the rows")] = DEFAULT_TILES

    def __post_init__(self) -> None:
        at_least_one(self, "tiles")


class PipelinedGemm(CheckedWorkload):
    """outputs: C, the product, rows by tiles."""

    name = "pipelined_gemm"
    category = "pipeline"
    priority = "P1"
    unit = "tiles"
    question = "Does the order in which the host emits a pipeline of collectives and GEMMs let them overlap?"
    stream_meaning = (
        "Stream 0 is the caller's, which writes the input, forks and joins; stream N−1 carries the "
        "collectives; the N−2 between are the workers to which the tiles are dealt."
    )
    min_streams = 3
    max_streams = DEFAULT_TILES + 2
    uses_collectives = True
    Options = PipelinedGemmOptions
    options: PipelinedGemmOptions

    @classmethod
    def refusal(
        cls, num_streams: int, options: WorkloadOptions, device_type: str, world_size: int
    ) -> str | None:
        assert isinstance(options, PipelinedGemmOptions)
        if num_streams - 2 <= options.tiles:
            return None
        return (
            f"{num_streams - 2} workers and only {options.tiles} tiles; ask for --streams "
            f"{options.tiles + 2} or fewer, or --tiles {num_streams - 2} or more"
        )

    def setup(self) -> None:
        context, options = self.context, self.options
        self.collective_stream = context.num_streams - 1
        self.lane = make_lanes(context, 1)[0]
        ranks = self.lane.size
        shape_options: Any = {"op": options.op, "num_tiles": options.tiles, "num_ranks": ranks}
        shape_options["num_streams"] = context.num_streams - 2
        self.program = emit_named(options.emission_order, **shape_options)
        self.inputs = Inputs(context)
        self._allocate(ranks)
        self.outputs = {"C": self.buffers["C"]}
        self.calls = self._compiled(self.program)
        # The same work without any order between tiles, for what each side costs alone.
        self.tiles = [
            step for step in emit(Shape(**shape_options)).unroll() if isinstance(step.op, Communicate | Gemm)
        ]

    def _allocate(self, ranks: int) -> None:
        size, tiles, inputs = self.context.size, self.options.tiles, self.inputs
        rows, k, n = ROWS_PER_TILE_AND_RANK[size], INNER[size], COLUMNS[size]
        gathers = self.options.op == "ag_gemm"
        # A gather's tile is a rank's own part of it; a reduction's has the rows of all ranks.
        num_rows = rows if gathers else rows * ranks
        self.source = inputs.normal("A", (tiles, num_rows, k), rank=self.context.rank)
        self.buffers = {
            "A": torch.empty_like(self.source),
            "W": inputs.normal("W", (k, n), k**-0.5, rank=None if gathers else self.context.rank),
            "C": inputs.zeros((tiles, rows if self.options.op == "gemm_rs" else rows * ranks, n)),
        }
        for name, buffer in self.program.buffers().items():
            if name not in self.buffers:
                self.buffers[name] = inputs.zeros((*buffer.tiles, rows * ranks, k if gathers else n))
        self.flops = 2.0 * tiles * rows * ranks * k * n

    def iteration(self, index: int) -> None:
        self._write_input()
        for call in self.calls:
            call()

    def _write_input(self) -> None:
        """Writes A on the caller's stream, before the fork: no worker may begin earlier."""
        self.context.span(CALLER, "input", partial(self.buffers["A"].copy_, self.source))

    def _compiled(self, program: Program) -> list[Callable[[], None]]:
        streams, events = self.context.streams, dict[Ref, StreamEvent]()
        numbers = {program.main_stream(): CALLER}

        def number(name: str) -> int:
            return numbers.setdefault(name, len(numbers))

        def call(step: Step) -> Callable[[], None] | None:
            op, stream = step.op, number(step.stream)
            match op:
                case Record(event=event, stream=named):
                    recorded = stream if named is None else number(str(named))
                    return lambda: events.__setitem__(event, streams.record(recorded))
                case Wait(event=event) | WaitWork(work=event):
                    return lambda: streams.wait(stream, events[event])
                case Gemm():
                    return lambda: self._multiply(op, stream)
                case Communicate(work=work) if work is not None:

                    def communicate() -> None:
                        self.context.after(self.collective_stream, stream)
                        self._communicate(op)
                        events[work] = streams.record(self.collective_stream)

                    return communicate
            return None

        return [action for step in program.unroll(0) if (action := call(step)) is not None]

    def _multiply(self, op: Gemm, stream: int) -> None:
        a, w, out = self._part(op.a), self._part(op.b), self._part(op.out)
        self.context.span(stream, "gemm", partial(torch.mm, a, w, out=out))

    def _communicate(self, op: Communicate) -> None:
        assert op.source is not None
        assert op.out is not None
        source, out, lane = self._part(op.source), self._part(op.out), self.lane
        work: Callable[[], None] = {
            "all_gather": lambda: lane.all_gather(out, source),
            "reduce_scatter": lambda: lane.reduce_scatter(out, source),
            "all_reduce": lambda: lane.all_reduce(out),
        }[op.op]
        self.context.span(self.collective_stream, f"comm {op.op}", work)

    def _part(self, ref: Ref) -> Tensor:
        return self.buffers[ref.name][tuple(int(str(i)) for i in ref.index)]

    def legs(self) -> Mapping[str, Callable[[int], None]]:
        return {
            "compute": lambda index: self._one_kind(Gemm),
            "comm": lambda index: self._one_kind(Communicate),
            "serial": lambda index: self._serial(),
        }

    def _one_kind(self, kind: type[Gemm] | type[Communicate]) -> None:
        for number, step in enumerate(self.tiles):
            if isinstance(step.op, kind):
                self._put(step.op, self._stream_of(number))

    def _serial(self) -> None:
        """Tile by tile, each piece after the one before it."""
        self.context.after(CALLER, *range(1, self.context.num_streams))
        self._write_input()
        last = CALLER
        for number, step in enumerate(self.tiles):
            stream = self._stream_of(number)
            self.context.after(stream, last)
            self._put(step.op, stream)
            last = stream

    def _stream_of(self, number: int) -> int:
        """Stream of a step of self.tiles, which has two per tile."""
        if isinstance(self.tiles[number].op, Communicate):
            return self.collective_stream
        return 1 + number // 2 % (self.context.num_streams - 2)

    def _put(self, op: object, stream: int) -> None:
        if isinstance(op, Communicate):
            self._communicate(op)
        elif isinstance(op, Gemm):
            self._multiply(op, stream)

    def amount(self) -> Amount:
        rows = self.buffers["C"].shape[0] * self.buffers["C"].shape[1]
        return Amount(operations=2 * self.options.tiles, samples=rows, units=self.options.tiles)

    def device_work(self) -> DeviceWork:
        return matrix_work(self.inputs.dtype, self.flops)

    def comparisons(self) -> Iterable[TensorComparison]:
        """Tile by tile; of a reduction C v = sum of A (W v) over ranks, for a vector v of signs."""
        weights, ranks = self.buffers["W"], self.lane.size
        for number, result in enumerate(self.buffers["C"]):
            part = self.source[number]
            if self.options.op == "ag_gemm":
                gathered = part.new_empty((ranks * len(part), part.shape[1]))
                Lane(self.lane.group).all_gather(gathered, part)
                yield product_comparison(f"tile {number}", gathered, weights, result)
                continue
            signs = weights.new_ones(weights.shape[1], dtype=torch.float64)
            signs[::3] = -1.0
            total = part.double() @ (weights.double() @ signs)
            Lane(self.lane.group).all_reduce(total)
            mine = slice(None)
            if self.options.op == "gemm_rs":
                first = self.context.rank * len(result)
                mine = slice(first, first + len(result))
            yield TensorComparison(f"tile {number}", result.double() @ signs, total[mine], 2e-2)

    def metrics(self) -> dict[str, float | None]:
        from aorta.programs.lint.one_rank import lint

        return {"false_edges": float(len(lint(self.program).false_edges))}

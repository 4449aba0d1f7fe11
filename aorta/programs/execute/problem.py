"""The problem: a matrix multiply beside a collective, its operands, its expected result, a program's tensors.

m rows, k inner, n columns of the whole product; D ranks.
ag_gemm: every rank holds m/D rows of A and all of W (k, n); C = all_gather(A) @ W is (m, n).
gemm_rs: every rank holds k/D columns of A and k/D rows of W; C = reduce_scatter(A @ W) is (m/D, n).
gemm_ar: the same operands; C = all_reduce(A @ W) is (m, n).
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aorta.device.backend import backend_of
from aorta.programs.execute.collectives import all_gather
from aorta.programs.language.emit import OPS
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Program

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
EXACT_BELOW = {
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
    torch.float32: 2**24,
    torch.float64: 2**53,
}
"""Integers up to this are exact in the type, and so is every order of adding them."""
LARGEST_FACTOR = 2
"""Largest magnitude of an integer operand."""
ROWS_AT_ONCE = 4096
"""Rows filled at a time, which bounds the memory of the masks."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Operation, shapes, type and number of ranks. Raises HostProgramError for sizes that do not split."""

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    num_ranks: int

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise HostProgramError(f"unknown operation {self.op!r}; known: {', '.join(OPS)}")
        for name in ("m", "n", "k", "num_ranks"):
            if getattr(self, name) < 1:
                raise HostProgramError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.m % self.num_ranks:
            raise HostProgramError(f"m {self.m} is not a multiple of {self.num_ranks} ranks")
        if not self.gathers and self.k % self.num_ranks:
            raise HostProgramError(f"{self.op} splits k {self.k} over {self.num_ranks} ranks: not a multiple")

    @property
    def gathers(self) -> bool:
        return self.op == "ag_gemm"

    @property
    def shard_rows(self) -> int:
        """Rows that belong to one rank."""
        return self.m // self.num_ranks

    @property
    def a_shape(self) -> tuple[int, int]:
        """Shape of this rank's part of A."""
        return (self.shard_rows, self.k) if self.gathers else (self.m, self.k // self.num_ranks)

    @property
    def w_shape(self) -> tuple[int, int]:
        return (self.k if self.gathers else self.k // self.num_ranks, self.n)

    @property
    def result_rows(self) -> int:
        """Rows of C on one rank."""
        return self.shard_rows if self.op == "gemm_rs" else self.m


class Operands:
    """A, W and a bias of this rank, filled with noise to be timed or with integers to be checked."""

    def __init__(self, problem: Problem, device: torch.device, rank: int) -> None:
        self.problem = problem
        self.device = device
        self.rank = rank
        self.a = torch.empty(problem.a_shape, dtype=problem.dtype, device=device)
        self.w = torch.empty(problem.w_shape, dtype=problem.dtype, device=device)
        self.bias = torch.zeros(problem.n, dtype=problem.dtype, device=device)

    def fill_random(self) -> None:
        """Fill with normal noise: a multiply's power, and with it the clock, depends on the data."""
        generator = torch.Generator(self.device).manual_seed(self.rank)
        self.a.normal_(generator=generator)
        self.w.normal_(std=self.problem.k**-0.5, generator=generator)
        self.bias.zero_()

    def fill_integers(self) -> None:
        """Fill with small integers, so few per row that no partial sum leaves the exact range of the type.

        Each row of A has other columns that are not zero, so that a row in the wrong place shows.
        """
        generator = torch.Generator(self.device).manual_seed(self.rank + 1)
        rows, columns = self.a.shape
        stride = self._stride()
        of_column = torch.arange(columns, device=self.device, dtype=torch.int32)
        for first in range(0, rows, ROWS_AT_ONCE):
            part = self.a[first : first + ROWS_AT_ONCE]
            of_row = torch.arange(first, first + len(part), device=self.device, dtype=torch.int32)
            mask = (of_column[None, :] + of_row[:, None]) % stride == 0
            part.copy_(self._integers(tuple(part.shape), generator) * mask)
        # W differs between ranks, in an all-gather too: there each rank multiplies columns of its own.
        self.w.copy_(self._integers(tuple(self.w.shape), generator))
        self.bias.copy_(self._integers(tuple(self.bias.shape), generator))

    def _integers(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        low, high = -LARGEST_FACTOR, LARGEST_FACTOR + 1
        return torch.randint(low, high, shape, dtype=torch.int8, device=self.device, generator=generator)

    def _stride(self) -> int:
        """Distance of columns that are not zero."""
        problem = self.problem
        largest = EXACT_BELOW[problem.dtype] - LARGEST_FACTOR  # room for a bias on top
        split = 1 if problem.gathers else problem.num_ranks
        terms = max(1, largest // (LARGEST_FACTOR**2 * split))
        return -(-problem.a_shape[1] // terms)


class Arena:
    """Memory that strategies use in turns: one piece per name, as large as the largest request."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._pieces: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Uninitialised tensor; valid until the same name is asked for with a larger shape."""
        count = math.prod(shape)
        piece = self._pieces.get(name)
        if piece is None or piece.numel() < count:
            piece = self._pieces[name] = torch.empty(count, dtype=self.dtype, device=self.device)
        return piece[:count].view(shape)


def reference(operands: Operands, group: dist.ProcessGroup, bias: bool = False) -> torch.Tensor:
    """C without any overlap: (m, n) with rows in the order of ranks, on every rank, whatever the operation.

    Collective; the host waits. expected() cuts out the rows that gemm_rs leaves on a rank.
    """
    problem = operands.problem
    if problem.gathers:
        gathered = torch.empty((problem.m, problem.k), dtype=problem.dtype, device=operands.device)
        all_gather(gathered, operands.a, group)
        result = torch.mm(gathered, operands.w)
    else:
        result = torch.mm(operands.a, operands.w)
        dist.all_reduce(result, group=group)
    if bias:
        result += operands.bias
    backend_of(operands.device).synchronize(operands.device)
    return result


def expected(problem: Problem, product: torch.Tensor, rank: int, num_tiles: int = 1) -> torch.Tensor:
    """Part of reference()'s product that this rank should hold.

    A reduce-scatter by tiles leaves each rank its share of every tile; with one tile, its rows of the whole.
    """
    if problem.op != "gemm_rs":
        return product
    shares = product.view(num_tiles, problem.num_ranks, -1, product.shape[-1])
    return shares[:, rank].reshape(-1, product.shape[-1])


def in_order_of_ranks(problem: Problem, result: torch.Tensor) -> torch.Tensor:
    """Copy of a program's C, [*tiles, rows, n], with the rows in reference()'s order.

    A tile of an all-gather holds that tile of every rank, so ranks are inside tiles.
    """
    tiles, n = result.shape[0], result.shape[-1]
    if problem.op != "ag_gemm":
        return result.reshape(-1, n)
    return result.view(tiles, problem.num_ranks, -1, n).transpose(0, 1).reshape(-1, n)


def bind(program: Program, operands: Operands, arena: Arena) -> dict[str, torch.Tensor]:
    """Tensor of every buffer of an emitted program, by name.

    Tiles cut the rows, so every tile is contiguous. Raises HostProgramError where the rows cannot be cut
    evenly, and for buffers that aorta.programs.language.emit does not make.
    """
    problem, buffers = operands.problem, program.buffers()
    if "A" not in buffers or "C" not in buffers:
        raise HostProgramError(f"{program.name} has no buffers A and C, as emitted programs have")
    tiles = buffers["A"].tiles[0] if buffers["A"].tiles else 1
    rows = _tile_rows(problem, tiles)
    tensors: dict[str, torch.Tensor] = {}
    for name, buffer in buffers.items():
        match name:
            case "A":
                tensors[name] = operands.a.view(*buffer.tiles, -1, operands.a.shape[1])
            case "W":
                tensors[name] = operands.w
            case "b":
                tensors[name] = operands.bias
            case "G" | "C" | "P":
                shape = (*buffer.tiles, rows[name] // _inner(buffer.tiles), _columns(problem, name))
                tensors[name] = arena.tensor(name, shape)
            case _:
                raise HostProgramError(
                    f"{program.name} has a buffer {name}, which emitted programs do not have"
                )
    return tensors


def _tile_rows(problem: Problem, tiles: int) -> dict[str, int]:
    """Rows that one tile of A has in each buffer."""
    rows = problem.a_shape[0]
    divisor = tiles * (problem.num_ranks if problem.op == "gemm_rs" else 1)
    if rows % divisor:
        raise HostProgramError(f"{rows} rows of A cannot be cut into {divisor} equal pieces")
    tile, ranks = rows // tiles, problem.num_ranks
    if problem.op == "ag_gemm":
        return {"G": tile * ranks, "C": tile * ranks}
    return {"P": tile, "C": tile // ranks if problem.op == "gemm_rs" else tile}


def _inner(tiles: tuple[int, ...]) -> int:
    """Ranks that are an index of their own: a ring's buffers have them there instead of inside the rows."""
    return tiles[1] if len(tiles) > 1 else 1


def _columns(problem: Problem, name: str) -> int:
    return problem.k if name == "G" else problem.n

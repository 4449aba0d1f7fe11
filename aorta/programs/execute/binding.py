"""Tensors for the buffers of an emitted program, and how its rows lie in the result."""

import torch

from aorta.programs.execute.problem import Operands, Problem
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Program


class Arena:
    """Memory that strategies take turns with: one piece per name, as large as the largest wish."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._pieces: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Uninitialised; valid until somebody asks for the same name with a larger shape."""
        count = 1
        for size in shape:
            count *= size
        piece = self._pieces.get(name)
        if piece is None or piece.numel() < count:
            piece = self._pieces[name] = torch.empty(count, dtype=self.dtype, device=self.device)
        return piece[:count].view(shape)


def bind(program: Program, operands: Operands, arena: Arena) -> dict[str, torch.Tensor]:
    """Tensors of every buffer of a program of aorta.programs.language.emit.

    Tiles cut the rows, so every tile is contiguous. Raises HostProgramError where the rows cannot be cut
    evenly, and for buffers that emit does not make.
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
                raise HostProgramError(f"{program.name} has a buffer {name}, which emitted programs have not")
    return tensors


def in_order_of_ranks(problem: Problem, result: torch.Tensor) -> torch.Tensor:
    """C of a program, [*tiles, rows, n], with the rows as reference() has them.

    A tile of an all-gather holds that tile of every rank, so ranks are inside tiles. A copy.
    """
    tiles, n = result.shape[0], result.shape[-1]
    if problem.op != "ag_gemm":
        return result.reshape(-1, n)
    return result.view(tiles, problem.num_ranks, -1, n).transpose(0, 1).reshape(-1, n)


def expected(problem: Problem, product: torch.Tensor, rank: int, num_tiles: int = 1) -> torch.Tensor:
    """Part of reference()'s product that this rank should hold.

    A reduce-scatter by tiles leaves each rank its share of every tile; with one tile, its rows of the whole.
    """
    if problem.op != "gemm_rs":
        return product
    shares = product.view(num_tiles, problem.num_ranks, -1, product.shape[-1])
    return shares[:, rank].reshape(-1, product.shape[-1])


def _tile_rows(problem: Problem, tiles: int) -> dict[str, int]:
    """Rows of one tile of A's in each buffer."""
    rows = problem.a_shape[0]
    divisor = tiles * (problem.num_ranks if problem.op == "gemm_rs" else 1)
    if rows % divisor:
        raise HostProgramError(f"{rows} rows of A cannot be cut into {divisor} equal pieces")
    tile, ranks = rows // tiles, problem.num_ranks
    if problem.op == "ag_gemm":
        return {"G": tile * ranks, "C": tile * ranks}
    return {"P": tile, "C": tile // ranks if problem.op == "gemm_rs" else tile}


def _inner(tiles: tuple[int, ...]) -> int:
    """A ring's buffers have the ranks as a second index instead of inside the rows."""
    return tiles[1] if len(tiles) > 1 else 1


def _columns(problem: Problem, name: str) -> int:
    return problem.k if name == "G" else problem.n

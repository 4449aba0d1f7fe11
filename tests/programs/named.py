"""Programs by the name of their order."""

from aorta.programs.language.emit import ORDERS, Shape, emit
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Program


def emit_named(order: str, **shape_options: object) -> Program:
    """Program of one of ORDERS; the other fields of Shape as keywords."""
    if order not in ORDERS:
        raise HostProgramError(f"unknown order {order!r}; known: {', '.join(ORDERS)}")
    fork, join = ORDERS[order]
    return emit(Shape(fork=fork, join=join, **shape_options))  # type: ignore[arg-type]

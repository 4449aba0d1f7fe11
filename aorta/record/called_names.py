"""What a line of the program calls, where that is no Python function and has no frame of its own.

The instruction at which a thread stands tells it: names in the code, as the source spells them, and no object
is looked at. `np.sort` of a module, `Tensor.add_` of what tensors alone have, else the name by itself.
"""

import dis
from types import CodeType

import numpy as np
import torch

LONGEST = 50_000
"""Bytes of a function's instructions, beyond which nothing is looked up."""
_OTHERS = (str, bytes, list, dict, set, tuple, int, float, np.ndarray)
_OF_TENSORS = {name for name in dir(torch.Tensor) if not name.startswith("__")} - {
    name for kind in _OTHERS for name in dir(kind)
}
_OF_PACKAGES = ("torch", "np", "numpy")
_Place = tuple[int, int]
"""Line and column."""


def calls_of(code: CodeType) -> dict[int, str]:
    """Names by the offset of the instruction that calls. Empty before Python 3.11, whose instructions have no
    columns."""
    found: dict[int, str] = {}
    if len(code.co_code) > LONGEST or not hasattr(code, "co_positions"):
        return found
    loads: dict[_Place, list[tuple[_Place, str, str]]] = {}
    """Of expressions that begin at a place: where each ends, its last name, and the instruction for it."""
    for one in dis.get_instructions(code):
        at = one.positions
        if at is None or None in (at.lineno, at.col_offset, at.end_lineno, at.end_col_offset):
            continue
        start, end = (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)
        if one.opname.startswith(("CALL", "PRECALL")):  # Python 3.11 calls functions of C in the latter
            known = [load for load in loads.get(start, ()) if load[0] < end]  # type: ignore[arg-type]
            if known:
                found[one.offset] = _name(known)
        elif one.opname.startswith("LOAD_") and one.opname != "LOAD_CONST" and isinstance(one.argval, str):
            loads.setdefault(start, []).append((end, one.argval, one.opname))  # type: ignore[arg-type]
    return found


def _name(loads: list[tuple[_Place, str, str]]) -> str:
    root, last = min(loads), max(loads)
    if last[2] not in ("LOAD_ATTR", "LOAD_METHOD"):
        return last[1]
    is_global = root[2] in ("LOAD_GLOBAL", "LOAD_NAME")
    # torch.nn.functional.x is called torch.x, and np.random.x np.x.
    if is_global and (len(loads) == 2 or root[1] in _OF_PACKAGES):
        return f"{root[1]}.{last[1]}"
    return f"Tensor.{last[1]}" if last[1] in _OF_TENSORS else last[1]

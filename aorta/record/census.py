"""Who holds a device's memory: every block that Python or autograd can reach, by kind, module and holder.

It reads what is there, once, when memory has run out: tensors that the garbage collector knows, the modules
and optimizers that own some of them, and the graphs that wait for a backward pass. Nothing is noted before.
What C++ alone holds (workspaces, buckets, results on their way) is not found.
"""

import gc
import linecache
import os
import re
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from aorta.record.collective_names import qualified_names
from aorta.records.libraries import library_of
from aorta.records.memory import HeldKind, HeldMemory

LONGEST_S = 10.0
"""The process is about to end, and others wait for it."""
MOST_NODES = 500_000
"""Of graphs."""
MOST_ROWS = 40
FEWEST_KEPT = 3
"""Tensors in one container from which on they are kept, and not on their way."""
NOTED = 0.02
"""Share of what is held from which on a single tensor has a holder."""
MOST_SOUGHT = 16
"""Objects for whose attribute, or the container around, all objects are looked through."""
DEEPEST = 4
"""Containers around a tensor that are looked through for a name."""
_VIEWS = ("TBackward", "ToCopyBackward", "ViewBackward", "TransposeBackward", "PermuteBackward",
          "ExpandBackward", "UnsafeViewBackward")  # fmt: skip
"""Nodes between a weight and what it is used in."""
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
LAST_NODE = 1 << 63
"""Sequence numbers from here on are of leaves; all others are below."""


class Census(NamedTuple):
    held: list[HeldMemory]
    is_whole: bool
    module: str
    """To which a backward pass has come: of the latest node of the step that still has what it saved."""


def census(
    device: torch.device,
    first_of_step: int = 0,
    frames: Sequence[FrameType] = (),
    longest_s: float = LONGEST_S,
) -> Census:
    """Who holds this device's memory. first_of_step: autograd's sequence number as the step began. frames: of
    the program, whose variables may be read for their names (they must be over, since reading keeps them)."""
    end_s = time.monotonic() + longest_s
    return _Census(device, first_of_step, frames, end_s).taken()


class _Census:
    def __init__(
        self, device: torch.device, first_of_step: int, frames: Sequence[FrameType], end_s: float
    ) -> None:
        self._device, self._first, self._frames, self._end_s = device, first_of_step, frames, end_s
        self._seen: set[int] = set()
        """Addresses of blocks that have a row."""
        self._rows: dict[tuple[HeldKind, str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._names: dict[int, str] = {}
        """Name of a parameter, by its id."""
        self._containers: dict[int, Any] = {}
        """By a tensor's id: a container that holds it."""
        self._sizes: dict[int, int] = defaultdict(int)
        """Tensors of this device in a container, by its id."""
        self._holders: dict[int, str] = {}
        """Names, by the id of a tensor or a container."""
        self._num_sought = 0
        self._modules: dict[Any, str] = {}
        """By node of a graph: the module at or before it."""
        self._saved_names: dict[type, list[str]] = {}
        """Attributes of a kind of node that hold what it saved."""
        self._is_whole = True

    def taken(self) -> Census:
        objects = gc.get_objects()
        tensors = [one for one in objects if issubclass(type(one), torch.Tensor)]
        on_device = [one for one in tensors if self._is_here(one)]
        middle_s = (time.monotonic() + self._end_s) / 2
        self._find_containers(objects, {id(one) for one in on_device}, middle_s)
        modules = [one for one in objects if issubclass(type(one), torch.nn.Module)]
        units = [one for one in objects if type(one).__name__ == "FSDPParam"]
        optimizers = [one for one in objects if issubclass(type(one), torch.optim.Optimizer)]
        del objects
        self._add_modules(modules, units)
        self._add_optimizers(optimizers)
        for one in on_device:
            if isinstance(one, torch.nn.Parameter):
                self._add("parameters", one, self._names.get(id(one), ""))
        module = self._add_graphs(on_device)
        self._add_others(on_device)
        rows = [
            HeldMemory(kind=kind, module=name, holder=holder, bytes=size, num_blocks=num)
            for (kind, name, holder), (size, num) in self._rows.items()
        ]
        rows.sort(key=lambda row: -row.bytes)
        return Census(rows[:MOST_ROWS], self._is_whole, module)

    def _is_late(self, end_s: float | None = None) -> bool:
        is_late = time.monotonic() > (end_s or self._end_s)
        self._is_whole = self._is_whole and not is_late
        return is_late

    def _is_here(self, tensor: torch.Tensor) -> bool:
        with suppress(Exception):
            return tensor.device == self._device or (
                tensor.device.type == self._device.type and self._device.index is None
            )
        return False

    def _block(self, tensor: Any) -> tuple[int, int]:
        """Address and size of a tensor's memory on the device; 0, 0 where it has none, or it is counted."""
        size = 0
        try:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if not issubclass(type(tensor), torch.Tensor) or not self._is_here(tensor):
                return 0, 0
            if tensor.layout is torch.sparse_coo:  # a gradient of embeddings
                size, tensor = tensor._indices().nbytes, tensor._values()
            block = tensor.untyped_storage()
            address, size = block.data_ptr(), size + block.nbytes()
        except Exception:  # those of a transform, of a subclass without memory
            return 0, 0
        return (0, 0) if address in self._seen or not size else (address, size)

    def _add(self, kind: HeldKind, tensor: Any, module: str = "", holder: str = "") -> None:
        """Count a block once, for the first that has it."""
        address, size = self._block(tensor)
        if address:
            self._seen.add(address)
            row = self._rows[kind, alike(module), holder]
            row[0] += size
            row[1] += 1

    # -- the model and its optimizer -----------------------------------------------------------

    def _add_modules(self, modules: list[Any], units: list[Any]) -> None:
        """Parameters, gradients and buffers. Names are those of the largest module that has them."""
        inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
        roots = [module for module in modules if id(module) not in inner] or modules
        sizes = {id(root): sum(entry.numel() for entry in root.parameters()) for root in roots}
        for root in sorted(roots, key=lambda root: -sizes[id(root)]):
            for reference, place in qualified_names(root).values():
                module = reference()
                if module is None:
                    continue
                for entry in module._parameters.values():
                    if entry is not None:
                        self._names.setdefault(id(entry), place)
                        self._add("parameters", entry, place)
                        self._add("gradients", entry.grad, place)
                for buffer in module._buffers.values():
                    self._add("buffers", buffer, place)
        for unit in units:
            place = str(getattr(unit, "_param_fqn", "") or "").rpartition(".")[0]
            for name in ("_unsharded_param", "sharded_param"):
                if (entry := getattr(unit, name, None)) is not None:
                    self._names.setdefault(id(entry), place)
                    self._add("parameters", entry, place)
                    self._add("gradients", getattr(entry, "grad", None), place)
            for gathered in getattr(unit, "all_gather_outputs", None) or ():
                self._add("parameters", gathered, place, "gathered by fully_shard")

    def _add_optimizers(self, optimizers: list[Any]) -> None:
        for optimizer in optimizers:
            for parameter, state in [*getattr(optimizer, "state", {}).items()]:
                name = self._names.get(id(parameter), "")
                for value in state.values() if isinstance(state, dict) else ():
                    self._add("optimizer state", value, name, type(optimizer).__name__)
            for group in getattr(optimizer, "param_groups", ()):
                for parameter in group["params"]:
                    self._add("parameters", parameter, self._names.get(id(parameter), ""))
                    self._add("gradients", parameter.grad, self._names.get(id(parameter), ""))

    # -- graphs --------------------------------------------------------------------------------

    def _add_graphs(self, tensors: list[torch.Tensor]) -> str:
        """What autograd keeps for backward passes. Returns the module of the latest node that keeps some."""
        roots = [(one, one.grad_fn) for one in tensors if one.grad_fn is not None]
        # The latest results first, so that graphs of this step are not taken for what an older one holds.
        roots.sort(key=lambda root: -min(root[1]._sequence_nr(), LAST_NODE))
        latest, module = -1, ""
        parts: list[tuple[torch.Tensor, list[tuple[torch.Tensor, str, bool]]]] = []
        """By root, what only its graph keeps, of those that come after it here: module, and whether it is of
        the step."""
        for tensor, node in roots:
            kept: list[tuple[torch.Tensor, str, bool]] = []
            for one, name in self._walked(node):
                number = one._sequence_nr()
                is_of_step = number >= self._first
                for saved in self._saved_by(one):
                    if number < LAST_NODE and number > latest and is_of_step:
                        latest, module = number, name
                    if self._block(saved)[1]:
                        kept.append((saved, name, is_of_step))
                if self._is_late():
                    break
            if kept:
                parts.append((tensor, kept))
        num_graphs = Counter(id(self._containers.get(id(tensor))) for tensor, _ in parts)
        for tensor, kept in parts:
            container = self._containers.get(id(tensor))
            is_kept = container is not None and num_graphs[id(container)] >= FEWEST_KEPT
            for saved, name, is_of_step in kept:
                if is_of_step and not is_kept:
                    self._add("activations", saved, name)
                else:
                    self._add("kept graphs", saved, name, self._holder(tensor) or "a tensor")
        return module

    def _walked(self, root: Any) -> Iterator[tuple[Any, str]]:
        """Nodes that nobody has come to, each with the module at or before it, inputs first."""
        visited, stack = self._modules, [(root, False)]
        while stack and len(visited) < MOST_NODES:
            node, is_left = stack.pop()
            if node is None or (not is_left and node in visited):
                continue
            before = [other for other, _ in node.next_functions if other is not None]
            if not is_left:
                visited[node] = ""
                stack.append((node, True))
                stack += [(other, False) for other in before]
                continue
            variable = getattr(node, "variable", None)
            name = "" if variable is None else self._names.get(id(variable), "")
            # A weight's own module comes before that of the input.
            names = [visited.get(other, "") for other in before]
            weights = [
                visited.get(other, "") for other in before if _source(other)._sequence_nr() >= LAST_NODE
            ]
            name = name or next((one for one in [*weights, *names] if one), "")
            visited[node] = name
            yield node, name

    # -- other tensors -------------------------------------------------------------------------

    def _add_others(self, tensors: list[torch.Tensor]) -> None:
        kept: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            if self._block(tensor)[1] and (container := self._kept_in(tensor)) is not None:
                kept[id(container)].append(tensor)
        for some in sorted(kept.values(), key=lambda some: -sum(self._block(one)[1] for one in some)):
            holder = self._holder(some[0])
            for one in some:
                self._add("kept tensors", one, holder=holder)
        noted = NOTED * sum(size for size, _ in self._rows.values())
        for tensor in tensors:
            node, size = tensor.grad_fn, self._block(tensor)[1]
            if node is not None and node in self._modules and node._sequence_nr() >= self._first:
                self._add("activations", tensor, self._modules[node])  # a result that goes on to the loss
            else:
                self._add("tensors", tensor, holder=self._holder(tensor) if size > noted else "")

    def _saved_by(self, node: Any) -> Iterator[Any]:
        """Tensors that a node keeps. What hooks have packed is theirs: to unpack it may compute it again."""
        names = self._saved_names.get(type(node))
        if names is None:
            names = [name for name in dir(node) if name.startswith("_raw_saved_")]
            self._saved_names[type(node)] = names
        for name in names:
            with suppress(Exception):
                saved = getattr(node, name)
                for one in saved if isinstance(saved, tuple | list) else (saved,):
                    yield one.data

    def _find_containers(self, objects: list[Any], wanted: set[int], end_s: float) -> None:
        """The largest container around each tensor; the one around it, where that holds several like it."""
        inner = self._around(objects, wanted, end_s)
        by_id = {id(container): container for container, _ in inner.values()}
        outer = self._around(objects, set(by_id), end_s)
        for tensor, (container, num) in inner.items():
            around, num_inner = outer.get(id(container), (None, 0))
            if num_inner >= FEWEST_KEPT and around is not inner:
                container, num = around, num_inner
            self._containers[tensor] = container
            self._sizes[id(container)] = num

    def _around(self, objects: list[Any], wanted: set[int], end_s: float) -> dict[int, tuple[Any, int]]:
        """By the id of an object: the container that has it and most others that are wanted, and how many."""
        found: dict[int, tuple[Any, int]] = {}
        for place, one in enumerate(objects):
            kind = type(one)
            if kind not in _CONTAINERS or one is objects:
                continue
            with suppress(RuntimeError):  # another thread changes it
                values = one.values() if kind is dict else one
                inside = [id(value) for value in values if id(value) in wanted]
                if inside and not (kind is dict and _is_namespace(one)):
                    for held in inside:
                        if len(inside) > found.get(held, (None, 0))[1]:
                            found[held] = one, len(inside)
            if place % 1024 == 0 and self._is_late(end_s):
                break
        return found

    def _kept_in(self, tensor: torch.Tensor) -> Any:
        """The container that keeps a tensor and others like it."""
        container = self._containers.get(id(tensor))
        return container if self._sizes.get(id(container), 0) >= FEWEST_KEPT else None

    def _holder(self, tensor: torch.Tensor) -> str:
        """What the program calls the container of a tensor, or the tensor itself; '' without a name."""
        container = self._kept_in(tensor)
        held = tensor if container is None else container
        if id(held) not in self._holders:
            name = _variable_of(held, self._frames) or self._sought(held)
            self._holders[id(held)] = name or ("" if container is None else f"a {type(held).__name__}")
        return self._holders[id(held)]

    def _sought(self, held: Any) -> str:
        """'losses (train.py:31)': the attribute that refers to an object, and the line that adds to it; else
        what refers to the container around it."""
        own = {id(one) for one in (self._containers, self._holders, self.__dict__, self._frames)}
        for _ in range(DEEPEST):
            if self._num_sought == MOST_SOUGHT or self._is_late():
                break
            self._num_sought += 1
            if name := _variable_of(held, self._frames) or _attribute_of(held, own):
                return name
            around = self._containers.get(id(held))
            if around is None and type(held) in _CONTAINERS:
                others = (one for one in gc.get_referrers(held) if id(one) not in own)
                around = next((one for one in others if type(one) in _CONTAINERS), None)
            if around is None:
                break
            held = around
        return ""


def _is_namespace(names: dict[Any, Any]) -> bool:
    """Of a Python module, or of a module of torch: what it holds has names of its own."""
    return "__builtins__" in names or "_parameters" in names


def _source(node: Any) -> Any:
    """The leaf behind a view or a cast of a weight; the node itself where there is none."""
    while type(node).__name__.startswith(_VIEWS):
        before = [other for other, _ in node.next_functions if other is not None]
        if len(before) != 1:
            return node
        node = before[0]
    return node


# ---- names -------------------------------------------------------------------------------------------


def alike(name: str) -> str:
    """'layers.*.mlp.up' of 'layers.3.mlp.up': layers that are alike are one."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _variable_of(held: Any, frames: Sequence[FrameType]) -> str:
    """A variable of a function that is over, or of a module of the program."""
    for frame in frames:
        code = frame.f_code
        if library_of(code.co_filename):
            continue
        for name, value in frame.f_locals.items():
            if value is held:
                return _placed(name, code.co_filename, code.co_firstlineno)
    for module in [*sys.modules.values()]:
        path = _file_of(module)
        if isinstance(module, ModuleType) and path and not library_of(path):
            for name, value in [*vars(module).items()]:
                if value is held:
                    return _placed(name, path)
    return ""


def _attribute_of(held: Any, skipped: set[int]) -> str:
    """An attribute of an object, of a class or of a function's closure."""
    for one in gc.get_referrers(held):
        if id(one) in skipped:
            continue
        if type(one) is dict:
            name = next((key for key, value in one.items() if value is held), None)
            owners = gc.get_referrers(one) if isinstance(name, str) else ()
            owner = next((other for other in owners if getattr(other, "__dict__", None) is one), None)
        elif type(one) is CellType:
            closures = [closure for closure in gc.get_referrers(one) if type(closure) is tuple]
            for function in gc.get_referrers(*closures):
                cells = (function.__closure__ or ()) if type(function) is FunctionType else ()
                # By identity: equal cells have equal contents, and to compare tensors is work for the device.
                place = next((i for i, cell in enumerate(cells) if cell is one), None)
                if place is not None:
                    code = function.__code__
                    return _placed(code.co_freevars[place], code.co_filename, code.co_firstlineno)
            continue
        else:
            names = vars(one) if hasattr(one, "__dict__") and type(one) is not FrameType else {}
            name = next((key for key, value in [*names.items()] if value is held), None)
            owner = one
        if isinstance(name, str) and owner is not None:
            kind = owner if isinstance(owner, type) else type(owner)
            path = _file_of(sys.modules.get(kind.__module__))
            return _placed(name, path, of=kind.__name__)
    return ""


def _file_of(module: ModuleType | None) -> str:
    """Python takes __file__ from a script that is over."""
    path = getattr(module, "__file__", None)
    if path is None and module is sys.modules.get("__main__"):
        path = sys.argv[0] if os.path.isfile(sys.argv[0]) else ""
    return path or ""


def _placed(name: str, path: str, first: int = 1, of: str = "") -> str:
    """'losses (train.py:31)', with the line that adds to it, or else makes it."""
    title = f"{name} of {of}" if of else name
    if not path or (library := library_of(path)):
        return f"{title} of {library}" if path else title
    lines = linecache.getlines(path)
    from_function_on = [*range(first, len(lines) + 1), *range(1, min(first, len(lines) + 1))]
    word = rf"\b{re.escape(name)}\b"
    for pattern in (
        rf"{word}\.(append|extend|add|insert|update|appendleft|setdefault)\(",
        rf"{word}\[[^\]]*\]\s*=[^=]",
        rf"{word}\s*\+=",
        rf"{word}\s*=[^=].*{word}",
        rf"{word}\s*(:[^=]*)?=[^=]",
        rf"{word}\s*,[^=(]*=[^=]",
        rf"[^=(]*,\s*{word}\s*=[^=]",
        rf"^\s*(async )?def .*{word}|\bfor .*{word}.* in\b|\bas {word}",
    ):
        for number in from_function_on:
            if re.search(pattern, lines[number - 1]):
                return f"{title} ({os.path.basename(path)}:{number})"
    return f"{title} ({os.path.basename(path)})"

"""What the program calls its parameters, modules and streams: a look at every object, for findings alone."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from aorta.check.sites import OURS, variables
from aorta.processes import no_garbage_collection


class Named:
    """One look at every object of this process."""

    def __init__(self) -> None:
        wanted = dict[type, list[Any] | None]()
        modules, self._streams = list[nn.Module](), list[torch.cuda.Stream]()
        for thing in gc.get_objects():
            kind = type(thing)
            if kind not in wanted:
                is_module, is_stream = issubclass(kind, nn.Module), issubclass(kind, torch.cuda.Stream)
                wanted[kind] = modules if is_module else self._streams if is_stream else None
            into = wanted[kind]
            if into is not None:
                into.append(thing)
        inner = {id(child) for module in modules for child in module.children()}
        self._outermost = [module for module in modules if id(module) not in inner]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All modules' parameters, each once, with the outermost module's name of it."""
        seen = set[int]()
        for module in self._outermost:
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name.removeprefix("module."), parameter

    def modules(self) -> dict[int, str]:
        """By id, the outermost module's name of each module within it."""
        return {
            id(inner): name.removeprefix("module.")
            for module in self._outermost
            for name, inner in module.named_modules()
            if name not in ("", "module")
        }

    def places(self) -> list[tuple[int, int, str]]:
        """Start and end of the bytes of each parameter and gradient of this process, and what they are."""
        places = []
        for name, parameter in self.parameters():
            for tensor, words in ((parameter, f"parameter {name}"), (parameter.grad, f"gradient of {name}")):
                local: Any = getattr(tensor, "_local_tensor", tensor)  # of a sharded one, this rank's part
                if type(local) in (Tensor, nn.Parameter) and local.layout is torch.strided:
                    start = local.data_ptr()
                    places.append((start, start + local.nbytes, words))
        return places

    def streams(self) -> dict[int, str]:
        """By handle, what the program calls its streams of a device."""
        names = names_of(self._streams)
        return {stream.cuda_stream: names[id(stream)] for stream in self._streams if id(stream) in names}


@no_garbage_collection()  # see aorta.record.stack_tree.frames_of
def names_of(things: Sequence[Any]) -> dict[int, str]:
    """By id, the longest name of each thing: of a variable, an attribute or a key."""
    wanted = {id(thing) for thing in things}
    holders = gc.get_referrers(*things) if things else []
    named: list[dict[str, Any]] = []
    for holder in holders:
        with suppress(Exception):  # what has no names, or asks its own code for them
            named.append(holder if type(holder) is dict else vars(holder))
    for frame in sys._current_frames().values():
        while frame is not None:
            if not frame.f_code.co_filename.startswith(OURS):
                named.append(variables(frame))
            frame = frame.f_back  # type: ignore[assignment]
    found: dict[int, str] = {}
    for names in named:
        for name, thing in list(names.items()):
            if id(thing) in wanted and isinstance(name, str) and len(name) > len(found.get(id(thing), "")):
                found[id(thing)] = name
    return found

"""Fourier transforms of lengths with a large prime factor, timed in a few steps: those of products of small
primes take a fraction of it, as a transform by a large prime goes through longer ones.

While such a step runs, calls of torch.fft's functions are noted.
"""

from collections import Counter, defaultdict
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch

from aorta.attach.call_flops import line_of_caller
from aorta.attach.noted_functions import NotedFunctions
from aorta.records.schema import FourierTransforms
from aorta.records.stacks import StackFrame

LARGE_PRIME = 100
"""From which on: a length with 101 takes three times as long as the next good one, in one thread and on an
H200; with 53 twice as long, and of one row no longer."""
HALVED = ("irfft", "hfft")
"""Which give as many real numbers as twice what they are given."""
NAMES = tuple(
    f"{way}{name}{dims}" for name in ("fft", "rfft", "hfft") for way in ("", "i") for dims in ("", "2", "n")
)


class _Step(NamedTuple):
    num: int
    ns: int
    """Of what a CPU computes."""
    on_device: int
    entries: int
    entries_with_gradient: int


class FourierLengths:
    def __init__(self) -> None:
        self._noted = NotedFunctions(torch.fft, NAMES, self._note)
        self._lengths = Counter[tuple[int, int]]()
        """Entries of transforms, by length and its largest prime factor."""
        self._at: dict[StackFrame | None, int] = defaultdict(int)
        self._calls: list[_Step] = []
        """Of the open step."""
        self._steps: list[_Step] = []

    def begin(self) -> None:
        self._noted.begin()

    def end(self, is_whole: bool = True) -> None:
        """Put everything back."""
        if self._noted.end() and is_whole:
            columns = zip(*self._calls, strict=True) if self._calls else [[0]] * len(_Step._fields)
            self._steps.append(_Step(*map(sum, columns)))
        self._calls = []

    def found(self) -> FourierTransforms | None:
        """Of the step in the middle; None without such transforms."""
        if not self._lengths or not self._steps:
            return None
        num, ns, on_device, entries, with_gradient = (
            median(map(int, column)) for column in zip(*self._steps, strict=True)
        )
        if not num:
            return None
        (((length, prime), _),) = self._lengths.most_common(1)
        return FourierTransforms(
            num=round(num),
            length=length,
            prime=prime,
            with_gradient=with_gradient / max(entries, 1),
            ms=None if on_device else ns / 1e6,
            at=max(self._at, key=lambda line: self._at[line]),
        )

    def _note(
        self, name: str, args: Any, named: dict[str, Any], found: torch.Tensor, ns: int, _: FrameType
    ) -> None:
        given = args[0] if args else named["input"]
        length = max(_lengths(name, given, *args[1:], **named), key=largest_prime)
        if (prime := largest_prime(length)) >= LARGE_PRIME:
            entries = max(given.numel(), found.numel())
            self._lengths[length, prime] += entries
            self._at[line_of_caller()] += entries
            self._calls.append(
                _Step(1, ns, int(given.device.type != "cpu"), entries, entries * found.requires_grad)
            )


def _lengths(
    name: str, given: torch.Tensor, size: Any = None, dim: Any = None, *_: Any, **named: Any
) -> list[int]:
    """Of the transforms that a function does, by what it is called with."""
    size = named.get("n", named.get("s", size))
    if not name.endswith(("2", "n")):
        dims = [-1 if dim is None else dim]
    elif dim is not None:
        dims = list(dim)
    elif name.endswith("2"):
        dims = [-2, -1]
    else:
        dims = list(range(-(given.ndim if size is None else len(size)), 0))
    if size is not None:
        return [size] if isinstance(size, int) else [*size]
    shape = [given.shape[one] for one in dims]
    return [*shape[:-1], 2 * (shape[-1] - 1)] if name.startswith(HALVED) else shape


def largest_prime(number: int) -> int:
    """That divides it; 1 of less than 2."""
    largest, divisor = 1, 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            number, largest = number // divisor, divisor
        divisor += 1
    return max(largest, number) if number > 1 else largest

"""Operators of a copy without data by the lines on the way to each: loops over them, and what lines move.

An operator that is called on the same way many times, all of it below one place of one running function, is
in a loop there, be it over modules, steps of time or rows. Layers that feed each other through weights of
their own are a deep model and no loop. What operators element by element hand to each other passes through
memory, and stays in registers where they are compiled into one.
"""

import sys
from collections import Counter, defaultdict
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from aorta.attach.layout_copies import line_of
from aorta.attach.program import ALIGNED
from aorta.records.libraries import library_of
from aorta.records.schema import LineOfWork, LoopKind, OperatorLoop
from aorta.records.stacks import StackFrame

FEWEST = 32
"""Times that a way is taken, from which on it is a loop: more than a model has layers as a rule."""
MOST_OPERATORS = 12_000
"""Of a call; what follows is not looked at."""
AROUND = (
    *("call_flops.py", "_python_dispatch.py", "_stats.py", "_ops.py"),
    *("_compile.py", "eval_frame.py"),
)
"""Files of functions that a mode puts around every operator."""
OF_A_TENSOR = ("_tensor.py", "overrides.py", "_device.py", "without_data.py")
"""Files of functions that call one operator each."""
FUSED = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}

_Way = tuple[int, int]
"""Number of a running function, and the places below it at which something was called."""


class _Place(NamedTuple):
    """Of a running function, on the way to an operator."""

    way: _Way
    before: int
    """Times that the way was taken before."""
    at: StackFrame | None
    """None in a library."""


class _Operator(NamedTuple):
    places: list[_Place]
    """The innermost first; of libraries those below the program's innermost one."""
    made_by: list[int]
    parameters: list[int]
    flops: int
    num_bytes: int
    fuses: bool
    made_bytes: int
    part_masked: float
    """Of its rows, that it multiplies by zero."""
    is_repeated: bool | None
    """As RepeatedOperators.see."""
    called_at: tuple[int, int]
    """Number of the program's innermost function, and the place in it."""

    @property
    def line(self) -> _Place | None:
        """The program's innermost one."""
        return next((place for place in self.places if place.at is not None), None)


class Repeated(NamedTuple):
    """What a call computes once more from the same, in both passes."""

    operators: int
    """Beside views."""
    flops: Counter[StackFrame | None]
    num_bytes: Counter[StackFrame | None]
    """By the line whose call does nothing else."""


class OddProducts(NamedTuple):
    """Products with rows of a length that is no multiple of ALIGNED."""

    num: int
    flops: float
    length: int
    at: StackFrame | None


class OperatorsByLine:
    """Of one call of a model. Operators have their numbers in the order of their calls."""

    def __init__(self, model: torch.nn.Module, outermost: CodeType) -> None:
        """outermost: the function that calls the model."""
        self._outermost = outermost
        self._parameters = {_storage(one) for one in model.parameters()}
        self._held: list[Any] = []
        """Frames and results, so that no other one gets their numbers."""
        self._lines: dict[tuple[CodeType, int], StackFrame] = {}
        self._times = Counter[_Way]()
        self._operators: list[_Operator] = []
        self._made_by: dict[int, int] = {}
        """The operator that made a storage, and the one of a node of autograd's."""
        self._of_node: dict[int, int] = {}
        self._backward: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        """Of each operator: operators of its backward pass, their FLOPs and bytes, and those beside views."""
        self._readers: dict[int, list[int]] = defaultdict(list)
        """Operators that read what one made."""
        self._products: list[tuple[int, int]] = []
        """Of either pass: the operator of the forward pass, and FLOPs."""
        self._lengths: dict[int, int] = {}
        """Of rows that do not begin at multiples, by operator."""
        self._read_otherwise: set[int] = set()
        """Not only by operators that it could be compiled with."""

    def see(
        self,
        func: Any,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        work: tuple[int, int],
        part_masked: float,
        is_repeated: bool | None,
    ) -> None:
        """An operator of the forward pass. work: its FLOPs, and its bytes where it has none. part_masked: of
        its rows, that it multiplies by zero. is_repeated: as RepeatedOperators.see."""
        number = len(self._operators)
        if number >= MOST_OPERATORS:
            return
        storages = {_storage(one) for one in given}
        places, called_at, is_direct = self._places(func._overloadpacket.__name__)
        new = [one for one in made if _storage(one) not in storages]
        operator = _Operator(
            places,
            [self._made_by[one] for one in storages if one in self._made_by],
            [*(storages & self._parameters)],
            *work,
            work[1] > 0 and is_direct and not FUSED.isdisjoint(func.tags),
            sum(one.nbytes for one in new),
            part_masked,
            is_repeated,
            called_at,
        )
        self._operators.append(operator)
        if work[0]:
            self._products.append((number, work[0]))
            is_product = "conv" not in func._overloadpacket.__name__  # whose rows are channels
            of = (*given, *made) if is_product else ()
            matrices = [one for one in of if one.dim() > 1 and min(one.shape[-2:]) > 1]
            lengths = [length for one in matrices if (length := max(one.stride()[-2:])) % ALIGNED]
            self._lengths |= {number: max(lengths)} if lengths else {}
        for one in operator.made_by if any(work) else ():  # a view reads nothing
            self._readers[one].append(number)
            if not operator.fuses or not _are_in_one_call(operator, self._operators[one]):
                self._read_otherwise.add(one)
        self._held += new
        self._made_by |= {_storage(one): number for one in new}
        # An operator without a node of its own comes behind another one's.
        self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, number)  # type: ignore[attr-defined]

    def see_backward(self, flops: int, num_bytes: int) -> None:
        """An operator of the backward pass."""
        node = torch._C._current_autograd_node()
        number = None if node is None else self._of_node.get(node._sequence_nr())
        if number is not None:
            self._products += [(number, flops)] if flops else []
            one = 1, flops, num_bytes, bool(flops or num_bytes)
            now = zip(self._backward[number], one, strict=True)
            self._backward[number] = [before + more for before, more in now]

    def ended(self) -> None:
        """Let go of frames: one keeps those of its callers, and with them all that the program has there."""
        self._held.clear()

    def lines(self, model_at: StackFrame | None) -> list[LineOfWork]:
        """Of each line that calls operators itself; model_at: that calls a model without lines."""
        numbers: dict[StackFrame, list[int]] = defaultdict(list)
        for number, operator in enumerate(self._operators):
            at = model_at if operator.line is None else operator.line.at
            if at is not None:
                numbers[at].append(number)
        return [self._line(at, of_line) for at, of_line in numbers.items()]

    def masked(self) -> Counter[StackFrame | None]:
        """FLOPs of both passes for rows that an operator then multiplies by zero, by its line: of all whose
        results nothing else reads."""
        by_line = Counter[StackFrame | None]()
        for number, operator in enumerate(self._operators):
            if not operator.part_masked:
                continue
            within = {number}
            for one in range(number - 1, -1, -1):
                if self._readers[one] and within.issuperset(self._readers[one]):
                    within.add(one)
            flops = sum(self._operators[one].flops + self._backward[one][1] for one in within)
            line = operator.line
            by_line[None if line is None else line.at] += round(operator.part_masked * flops)
        return by_line

    def repeated(self) -> Repeated:
        """By lines of functions that do something else, too: what is called there is repeated whole."""
        found = Repeated(0, Counter(), Counter())
        anew = {place.way[0] for one in self._operators if one.is_repeated is False for place in one.places}
        for number, one in enumerate(self._operators):
            if one.is_repeated:
                lines = [place for place in one.places if place.at is not None]
                at = next((place.at for place in lines if place.way[0] in anew), None)
                backward = self._backward[number]
                found = found._replace(operators=found.operators + 1 + backward[3])
                found.flops[at] += one.flops + backward[1]
                found.num_bytes[at] += one.num_bytes + backward[2]
        return found

    def odd_products(self, aligned: int) -> OddProducts | None:
        """Those of the step's largest products: of smaller ones nobody could tell the kernels apart. aligned:
        elements of 16 bytes, of the type that is multiplied."""
        products = [(flops, number, self._lengths.get(number, 0)) for number, flops in self._products]
        largest = max((flops for flops, _, length in products if not length % aligned), default=0)
        odd = [one for one in products if one[2] % aligned and one[0] > largest]
        if not odd:
            return None
        flops, number, length = max(odd)
        line = self._operators[number].line
        return OddProducts(len(odd), float(sum(one[0] for one in odd)), length, line and line.at)

    def loop(self) -> OperatorLoop | None:
        """The one with most operators."""
        loops: dict[tuple[str, str], list[tuple[int, _Place]]] = defaultdict(list)
        for number, operator in enumerate(self._operators):
            place = next((one for one in operator.places if self._times[one.way] >= FEWEST), None)
            if place is not None and place.at is not None:  # a library's own loop is none of the program's
                loops[place.at.file, place.at.outer_function].append((number, place))
        found = [one for loop in loops.values() if (one := self._loop(loop)) is not None]
        return max(found, key=lambda loop: loop.all_operators, default=None)

    def _line(self, at: StackFrame, numbers: list[int]) -> LineOfWork:
        operators = [self._operators[number] for number in numbers]
        backward = [self._backward[number] for number in numbers]
        flops, num_bytes = sum(one.flops for one in operators), sum(one.num_bytes for one in operators)
        num, more_flops, more_bytes, _ = (sum(of) for of in zip(*backward, strict=True))
        handed = {
            number: (1 + len(self._readers[number])) * operator.made_bytes
            for number, operator in zip(numbers, operators, strict=True)
            if operator.fuses and self._readers[number] and number not in self._read_otherwise
        }
        repeated = [num for number, num in handed.items() if self._operators[number].is_repeated]
        return LineOfWork(
            at=at,
            operators=len(operators) + num,
            flops=float(flops + more_flops),
            bytes=float(num_bytes + more_bytes),
            forward_flops=float(flops),
            forward_bytes=float(num_bytes),
            handed_bytes=float(sum(handed.values())),
            handed_again_bytes=float(sum(repeated)),
            forward_computing=float(sum(one.flops + one.num_bytes > 0 for one in operators)),
            forward_again=float(sum(one.is_repeated is True for one in operators)),
        )

    def _loop(self, loop: list[tuple[int, _Place]]) -> OperatorLoop | None:
        """None of layers. loop: operators of one function, and where each is in it."""
        # Where one call of Python's is several operators of a name, an iteration takes its way as often.
        times = [self._times[place.way] for _, place in loop]
        num = min(times)
        iterations = {
            number: place.before * num // of_way for (number, place), of_way in zip(loop, times, strict=True)
        }
        depends: set[int] = set()
        for number, iteration in iterations.items():
            before = [one for one in self._operators[number].made_by if one in iterations]
            if any(one in depends or iterations[one] != iteration for one in before):
                depends.add(number)
        operators = [self._operators[number] for number in iterations]
        weighted = {number for number in iterations if self._operators[number].parameters}
        has_own = len({key for one in operators for key in one.parameters}) >= num
        is_in_turn = not depends.isdisjoint(weighted) if weighted else bool(depends)
        if has_own and is_in_turn:
            return None
        kind: LoopKind = "modules" if has_own else "recurrence" if is_in_turn else "parts"
        num_at = Counter(place.at for _, place in loop if place.at is not None)
        return OperatorLoop(
            kind=kind,
            at=max(num_at, key=num_at.__getitem__),
            first_line=min(at.line for at in num_at),
            last_line=max(at.line for at in num_at),
            iterations=num,
            operators=len(operators),
            all_operators=len(operators) + sum(self._backward[number][0] for number in iterations),
            flops=float(sum(one.flops for one in operators)),
            bytes=float(sum(one.num_bytes for one in operators)),
        )

    def _places(self, name: str) -> tuple[list[_Place], tuple[int, int], bool]:
        """On the way to an operator; its called_at; whether the program calls it itself, not a function of
        torch's made of several."""
        below, found, is_direct, is_inside, called_at = hash(name), list[_Place](), True, False, (0, 0)
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code.co_filename.endswith(AROUND):
            frame = frame.f_back
        while frame is not None and frame.f_code is not self._outermost:
            code = frame.f_code
            below = hash((below, code, frame.f_lasti))
            is_program = not library_of(code.co_filename)
            is_direct &= is_program or is_inside or code.co_filename.endswith(OF_A_TENSOR)
            if is_program and not is_inside:
                is_inside, called_at = True, (id(frame), frame.f_lasti)
            if is_program or not is_inside:
                self._held.append(frame)
                way, key = (id(frame), below), (code, frame.f_lineno)
                if is_program and key not in self._lines:
                    self._lines[key] = line_of(frame)
                found.append(_Place(way, self._times[way], self._lines.get(key) if is_program else None))
                self._times[way] += 1
            frame = frame.f_back
        return found, called_at, is_direct


def _are_in_one_call(one: _Operator, other: _Operator) -> bool:
    """Of a function, but not of an operator that is taken apart where there is no data."""
    return one.called_at[0] == other.called_at[0] != 0 and one.called_at[1] != other.called_at[1]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

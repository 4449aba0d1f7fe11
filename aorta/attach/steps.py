"""Which calls of optimizers, or which backward passes, make one iteration of a training loop.

Plain logic on what the hooks see, without torch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAX_PERIOD = 64
"""Most backward passes that an iteration without a visible optimizer may have."""
MIN_REPEATS = 3
"""Repetitions after which a pattern of backward passes is believed."""


@dataclass(frozen=True)
class Ends:
    """What the end of a call says about iterations."""

    at_previous_call: bool = False
    """The call before this one was the last of its iteration."""
    at_this_call: bool = False
    """This call is the last of its iteration."""


class OptimizerCycle:
    """Learns the calls of optimizers that make one iteration: one as a rule, one after another for several
    optimizers (discriminator, generator).

    An iteration is the shortest run of calls after which its first one comes again behind a backward pass.
    Gradient accumulation needs nothing: its backward passes have no call between them.
    """

    def __init__(self) -> None:
        self.calls: tuple[Hashable, ...] | None = None
        """Keys of the calls of an iteration, once that is known."""
        self._open: list[Hashable] = []
        self._num_calls = 0
        self._num_behind = 0

    def ended(self, key: Hashable, behind_backward: bool) -> Ends:
        """Note the end of a call. key: of the optimizer; behind_backward: a backward pass ran since the
        call before."""
        self._num_calls += 1
        self._num_behind += behind_backward
        # Gradients that do not come from autograd: no call is ever behind a backward pass.
        behind = behind_backward or self._num_behind == 0
        if self.calls is None:
            return self._learn(key, behind)
        place = len(self._open)
        if key == self.calls[place]:
            return self._next(key)
        if key == self.calls[0] and behind:  # a later optimizer was left out this time
            self._open = []
            return Ends(at_previous_call=True, at_this_call=self._next(key).at_this_call)
        self.calls = None  # another optimizer than in the iterations so far: learned anew
        return self._learn(key, behind)

    @property
    def is_open(self) -> bool:
        """Whether an iteration has begun that is not over: some of its calls were seen, others were not."""
        return bool(self._open)

    def _learn(self, key: Hashable, behind: bool) -> Ends:
        if self._open and key == self._open[0] and behind:
            self.calls, self._open = tuple(self._open), []
            return Ends(at_previous_call=True, at_this_call=self._next(key).at_this_call)
        self._open.append(key)
        return Ends()

    def _next(self, key: Hashable) -> Ends:
        assert self.calls is not None
        self._open.append(key)
        if len(self._open) < len(self.calls):
            return Ends()
        self._open = []
        return Ends(at_this_call=True)


class BackwardCycle:
    """Learns the backward passes of an iteration from the collectives between them, for loops whose optimizer
    cannot be seen (not from torch.optim, or compiled).

    The passes of gradient accumulation communicate differently from the last one, which ends the iteration.
    """

    def __init__(self) -> None:
        self.period: int | None = None
        self._signatures: list[tuple[Hashable, ...]] = []
        self._until_end = 0

    def ended(self, signature: Sequence[Hashable]) -> bool:
        """Note the end of a backward pass; True where it is the last of an iteration.

        signature: the collectives since the end of the pass before.
        """
        if self.period is None:
            self._signatures.append(tuple(signature))
            del self._signatures[: -MIN_REPEATS * MAX_PERIOD]
            self.period = _period(self._signatures)
            if self.period is None:
                return False
            self._until_end = self._distance_to_end(self.period)
        else:
            self._until_end -= 1
        if self._until_end == 0:
            self._until_end = self.period
            return True
        return False

    def _distance_to_end(self, period: int) -> int:
        """How many passes after this one an iteration ends: at the pass that communicates most."""
        last = self._signatures[-period:]
        busiest = max(range(period), key=lambda place: (len(last[place]), place))
        return (busiest + 1) % period


def _period(signatures: Sequence[Hashable]) -> int | None:
    """The shortest period of the last signatures that is seen MIN_REPEATS times."""
    for period in range(1, MAX_PERIOD + 1):
        length = period * MIN_REPEATS
        if len(signatures) < length:
            return None
        last = signatures[-length:]
        if all(last[i] == last[i + period] for i in range(length - period)):
            return period
    return None


class LoaderSign:
    """Learns whether iterations begin with a batch of one data set.

    The programs that ask a DataLoader for a batch after the optimizer and before the first backward pass, in
    every iteration, do; others fetch ahead, or make their batches themselves.
    """

    def __init__(self) -> None:
        self.dataset: int | None = None
        """Key of the data set whose batches begin iterations; None: not known, or they do not."""
        self._requested: set[int] = set()
        self._requested_last: set[int] | None = None
        self._num_failures = 0

    def batch_requested(self, dataset: int) -> None:
        """Between an optimizer and the next backward pass."""
        self._requested.add(dataset)

    def iteration_ended(self) -> None:
        """Compare the iteration with the one before."""
        common = self._requested & (self._requested_last or set())
        self._requested_last, self._requested = self._requested, set()
        if self.dataset is None and common and self._num_failures == 0:
            self.dataset = min(common)

    def fails(self) -> None:
        """An iteration began otherwise."""
        self.dataset = None
        self._num_failures += 1

"""Learns what makes one iteration of a training loop: calls of optimizers, backward passes, batches.

Plain logic on what the hooks see, without torch. The session tells OptimizerCycle of each call of an
optimizer; where there is none, it tells BackwardCycle of each backward pass. Both answer with `Ends`.
LoaderSign learns whether iterations begin with a batch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAX_PERIOD = 64
"""Limit of backward passes in an iteration without a visible optimizer."""
MIN_REPEATS = 3
"""Repetitions from which on a pattern of backward passes is believed."""
PATIENCE_PASSES = 8
"""Backward passes without a call of an optimizer after which iterations are looked for in the collectives."""
MAX_PASSES = MIN_REPEATS * MAX_PERIOD
"""Backward passes that are remembered; those without a call where the program has an optimizer."""
PATIENCE_CALLS = 8
"""Calls after which iterations are learned although some optimizer of the program was not called yet."""
MOST_LEFT_OUT = 3
"""Iterations in a row without their later optimizers after which iterations are learned anew."""
MAX_CALLS = 64
"""Limit of calls of optimizers in an iteration."""


@dataclass(frozen=True)
class Ends:
    """The iterations that are known to have ended, now that a call has."""

    earlier: tuple[int, ...] = ()
    """Numbers of calls ago at which iterations ended, oldest first: 1 is the call before this one."""
    at_this_call: bool = False
    """This call is the last of its iteration."""


_NONE, _HERE = Ends(), Ends(at_this_call=True)
"""By far most answers, each made once: a short loop asks thousands of times a second."""


class OptimizerCycle:
    """Learns the calls of optimizers that make one iteration: one as a rule, one after another for several
    optimizers (discriminator, generator).

    An iteration is the shortest run of calls after which its first one comes again behind a backward pass,
    and which calls every optimizer of the program, if the first few calls do: a critic may be called several
    times before its generator. Gradient accumulation needs nothing: its backward passes have no call between
    them. An optimizer of gradients that no backward pass made, called after several iterations of another one
    (the outer one of local training), makes no iteration of its own. Where hooks of the backward pass call
    the optimizers, the first pass may call them in an order of its own, as DDP's first buckets do.
    """

    def __init__(self) -> None:
        self.calls: tuple[Hashable, ...] | None = None
        """Keys of the calls of an iteration, once that is known."""
        self._first: list[tuple[Hashable, bool]] | None = []
        """The first calls, while some optimizer was not called yet; None once they were judged."""
        self._open: list[Hashable] = []
        """The calls of the iteration that has begun, or the run that may turn out to be one."""
        self._heads: dict[Hashable, int] = {}
        """Last place in that run at which each key's call came behind a backward pass."""
        self._longer: list[Hashable] = []
        """While an iteration is learned anew: that run, behind the calls since the last learning, if few."""
        self._since_learned: list[Hashable] = []
        """The calls since the iteration was learned, up to MAX_CALLS."""
        self._is_confirmed = False
        """An iteration of these calls has come again since it was learned."""
        self._earlier_calls: tuple[Hashable, ...] | None = None
        """While learned anew: what the iteration was taken for before."""
        self._strangers: set[Hashable] = set()
        """Optimizers that are called once in a long while, within iterations of the others."""
        self._num_behind = 0
        """Calls that came behind a backward pass."""
        self._num_left_out = 0
        """Iterations in a row in which later optimizers were not called."""

    def ended(self, key: Hashable, behind_backward: bool, num_uncalled: int = 0) -> Ends:
        """Note the end of a call. key: of the optimizer; behind_backward: a backward pass ran since the
        call before; num_uncalled: optimizers of the program that were never called."""
        self._num_behind += behind_backward
        # Gradients that do not come from autograd: no call is ever behind a backward pass.
        behind = behind_backward or self._num_behind == 0
        if self._first is None:
            return self._judge(key, behind)
        if self._first and num_uncalled == 0 and behind and key == self._first[0][0]:
            run = [earlier for earlier, _ in self._first]
            if len(set(run)) == 1:  # what was waited for is called beside the loop
                self._first.append((key, behind))
                return self._judge_first()
            self._first = None
            return self._learned(run, key)
        if is_outer := not behind and self._is_outer(key):
            self._strangers.add(key)
        self._first.append((key, behind))
        return self._judge_first() if is_outer or len(self._first) == PATIENCE_CALLS else _NONE

    @property
    def is_open(self) -> bool:
        """True while an iteration is under way: some of its calls were seen, others were not."""
        return bool(self._open)

    @property
    def is_first_iteration(self) -> bool:
        """True while each call so far was of another optimizer: all of them may be one iteration."""
        keys = self._open if self._first is None else [key for key, _ in self._first]
        return self.calls is None and len(set(keys)) == len(keys) > 0

    def _is_outer(self, key: Hashable) -> bool:
        """True for the first call of this optimizer after repeated calls of others behind backward passes."""
        assert self._first is not None
        keys = [earlier for earlier, _ in self._first]
        return key not in keys and sum(earlier == keys[0] and behind for earlier, behind in self._first) > 1

    def _judge_first(self) -> Ends:
        """Judge the first calls at once, without waiting longer for an optimizer that may never be called."""
        assert self._first is not None
        first, self._first = self._first, None
        if not any(behind for _, behind in first[1:]):
            # Backward passes were only before the loop: what they did is replayed, as a captured graph.
            first, self._num_behind = [(key, True) for key, _ in first], 0
        last = len(first) - 1
        ends: list[int] = []
        for place, (key, behind) in enumerate(first):
            end = self._judge(key, behind)
            ends += [place - ago for ago in end.earlier] + [place] * end.at_this_call
        return Ends(tuple(last - place for place in ends if place < last), last in ends)

    def _judge(self, key: Hashable, behind: bool) -> Ends:
        """Compare a call with the iteration as it was learned, and learn anew where it does not fit."""
        if key in self._strangers:
            return _NONE
        if self.calls is None:
            return self._learn(key, behind)
        if key == self.calls[len(self._open)]:
            return self._next(key)
        if key == self.calls[0] and behind:  # a later optimizer was left out this time
            self._open = []
            self._num_left_out += 1
            if self._num_left_out < MOST_LEFT_OUT:
                return Ends((1,), self._next(key).at_this_call)
            self.calls, self._num_left_out = None, 0
            self._learn(key, behind)
            return Ends((1,))
        # Another optimizer than in the iterations so far.
        self._longer = self._since_learned if self._is_confirmed else self._open
        if len(self._longer) >= MAX_CALLS:
            self._longer = []
        self._earlier_calls, self.calls, self._open = self.calls, None, []
        return self._learn(key, behind)

    def _learn(self, key: Hashable, behind: bool) -> Ends:
        for run in (self._open, self._longer):
            if run and key == run[0] and behind:
                return self._learned(run, key)
        if not self._open:
            self._heads.clear()
        if behind:
            place = self._heads.get(key, 0)
            if place and set(self._open[place:]) == set(self._open):  # what lies before had another order
                ago = len(self._open) - place + 1
                learned = self._learned(self._open[place:], key)
                return Ends((ago, *learned.earlier), learned.at_this_call)
            self._heads[key] = len(self._open)
        self._open.append(key)
        if self._longer:
            self._longer.append(key)
        if len(self._open) > MAX_CALLS and self._earlier_calls is not None:
            self._strangers.add(self._open[0])
            self.calls, self._open = self._earlier_calls, []
        return _NONE

    def _learned(self, run: Sequence[Hashable], key: Hashable) -> Ends:
        """Take this run, whose first call has come again, as the iteration."""
        self.calls, self._is_confirmed = tuple(run), False
        self._open, self._longer, self._since_learned = [], [], list(run)
        return Ends((1,), self._next(key).at_this_call)

    def _next(self, key: Hashable) -> Ends:
        """Note a call that fits; it may be the last of its iteration."""
        assert self.calls is not None
        self._open.append(key)
        if len(self._since_learned) < MAX_CALLS:
            self._since_learned.append(key)
        if len(self._open) < len(self.calls):
            return _NONE
        self._open, self._num_left_out, self._is_confirmed = [], 0, True
        return _HERE


class BackwardCycle:
    """Learns the backward passes of an iteration from the collectives between them, for loops whose optimizer
    cannot be seen (not from torch.optim).

    The passes of gradient accumulation communicate differently from the last one, which ends the iteration.
    """

    def __init__(self) -> None:
        self.period: int | None = None
        self.num_forgotten = 0
        """Backward passes too long ago to tell where iterations ended among them."""
        self._signatures: list[tuple[Hashable, ...]] = []
        self._until_end = 0
        """Backward passes until the iteration ends, once the period is known."""

    def ended(self, signature: Sequence[Hashable], is_patient: bool = False) -> Ends:
        """Note the end of a backward pass.

        signature: the collectives since the end of the pass before. is_patient: the program has an optimizer
        that was not called yet, so that the passes may be many of gradient accumulation.
        """
        if self.period is None:
            return self._learn(tuple(signature), is_patient)
        self._until_end -= 1
        return Ends(at_this_call=self._is_end())

    def _learn(self, signature: tuple[Hashable, ...], is_patient: bool) -> Ends:
        signatures = self._signatures
        signatures.append(signature)
        self.num_forgotten += max(0, len(signatures) - MAX_PASSES)
        del signatures[:-MAX_PASSES]
        if len(signatures) < (MAX_PASSES if is_patient else PATIENCE_PASSES):
            return _NONE
        self.period = _period(signatures)
        if self.period is None:
            return _NONE
        self._until_end = self._distance_to_end(self.period)
        last = len(signatures) - 1
        earlier = tuple(last - place for place in self._past_ends(self.period, last + self._until_end))
        return Ends(earlier, self._is_end())

    def _is_end(self) -> bool:
        if self._until_end == 0:
            self._until_end = self.period or 0
            return True
        return False

    def _past_ends(self, period: int, end: int) -> list[int]:
        """Find the passes before the last one at which iterations ended, as far back as the pattern goes.

        The first pass may have what set the program up before its own collectives, or none, if an iteration's
        collectives follow its backward pass.
        """
        signatures, places = self._signatures, list[int]()
        place = end - period
        while place >= 0:
            expected = signatures[place + period if place + period < len(signatures) else place]
            first = place < period and (_ends_with(signatures[place], expected) or not signatures[place])
            if not first and signatures[place] != expected:
                break
            places.insert(0, place)
            place -= period
        return places

    def _distance_to_end(self, period: int) -> int:
        """Count the passes from this one to the end of an iteration: the pass that communicates most."""
        last = self._signatures[-period:]
        busiest = max(range(period), key=lambda place: (len(last[place]), place))
        return (busiest + 1) % period


def _ends_with(signature: Sequence[Hashable], end: Sequence[Hashable]) -> bool:
    return list(signature[max(0, len(signature) - len(end)) :]) == list(end)


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

    They do in a program that asks a DataLoader for a batch after the optimizer and before the first backward
    pass, in every iteration. Other programs fetch ahead, or make their batches themselves.
    """

    def __init__(self) -> None:
        self.dataset: int | None = None
        """Key of the data set whose batches begin iterations; None: not known, or they do not."""
        self._requested: set[int] = set()
        self._requested_last: set[int] | None = None
        self._num_failures = 0

    def batch_requested(self, dataset: int) -> None:
        """Note a batch that is asked for between an optimizer and the next backward pass."""
        self._requested.add(dataset)

    def iteration_ended(self) -> None:
        """Compare the iteration with the one before: a data set that both asked is the sign."""
        if not self._requested and not self._requested_last:
            return
        common = self._requested & (self._requested_last or set())
        self._requested_last, self._requested = self._requested, set()
        if self.dataset is None and common and self._num_failures == 0:
            self.dataset = min(common)

    def fails(self) -> None:
        """Note that an iteration began without its batch: the sign is not believed again."""
        self.dataset = None
        self._num_failures += 1

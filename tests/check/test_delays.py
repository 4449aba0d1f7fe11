"""Which operations a trial delays and compares: here the earlier one is under way until the clock says."""

from types import SimpleNamespace

import pytest
import torch

from aorta.check.delays import DeviceTrial, Suspect, Trial, common
from aorta.check.operators import Issued

EARLIER, LATER, OTHER = 1, 2, 3


class Clocked(Trial):
    """Notes the place of the operation that was delayed, and of the one that was compared with it."""

    def __init__(self, suspect, lasts=100):
        super().__init__(suspect)
        self.place, self.lasts, self.until = -1, lasts, 0
        self.delayed_at = self.compared_at = None

    def delayed(self, issued, run):
        self.delayed_at, self.until = self.place, self.place + self.lasts
        return run()

    def compared(self, issued, run):
        if self._overtakes(has_ended=self.place >= self.until):
            self.compared_at = self.place
        return run()


def tried(suspect, operations, **options):
    """(place that was delayed, place that was compared) of a trial with these (site, address, new memory)."""
    trial = Clocked(suspect, **options)
    for trial.place, (site, address, new) in enumerate(operations):
        issued = Issued("op", False)
        issued.site = site
        accesses = [(None, (address, 8))]
        issued.reads, issued.writes = ([], accesses) if site == EARLIER else (accesses, [])

        def run(issued=issued, new=new):
            issued.writes += [(None, (new, 8))] if new else []

        trial.issue(issued, run)
    trial.end()
    return trial.delayed_at, trial.compared_at


def suspect(**options):
    return Suspect(earlier=EARLIER, later=LATER, earlier_stream="s", **options)


def test_the_later_operation_is_the_one_that_shares_bytes():
    operations = [(EARLIER, 0, 0), (OTHER, 0, 0), (LATER, 64, 0), (LATER, 4, 0)]
    assert tried(suspect(), operations) == (0, 3)


def test_the_bytes_of_a_result_count():
    assert tried(suspect(), [(EARLIER, 0, 32), (LATER, 64, 0), (LATER, 32, 0)]) == (0, 2)


def test_the_second_trial_delays_the_pair_that_lies_closest():
    """The delay of the first bucket has ended where the optimizer reads it; the last one's has not."""
    buckets = [(EARLIER, place * 8, 0) for place in range(5)]
    operations = [*buckets, *[(LATER, place * 8, 0) for place in range(5)]]
    one = suspect()
    assert tried(one, operations, lasts=3) == (0, None)
    closest, later = one.pair or (-1, -1)
    assert closest == later  # which of the five is a matter of time
    assert tried(one, operations, lasts=6) == (closest, 5 + later)
    assert (one.is_overtaken, one.num_delayed, one.num_trials) == (True, 2, 2)


def test_the_next_owner_of_freed_memory_is_known_behind_the_first_trial():
    """Two allocations at one site; only the second one gets the memory that was freed."""
    operations = [(EARLIER, 0, 0), (EARLIER, 8, 0), (LATER, 900, 64), (LATER, 900, 8)]
    one = suspect(following=LATER)
    assert tried(one, operations) == (0, 2)
    assert one.pair == (1, 1)
    assert tried(one, operations) == (1, 3)


def test_two_that_read_the_same_bytes_are_no_pair():
    assert tried(suspect(), [(EARLIER, 0, 0), (LATER, 64, 0)]) == (0, None)
    reader = Suspect(earlier=LATER, later=OTHER, earlier_stream="s")
    assert tried(reader, [(LATER, 0, 0), (OTHER, 0, 0), (OTHER, 64, 4)]) == (0, None)
    assert reader.pair == (0, 1)


def test_operations_that_share_nothing_are_never_compared():
    one = suspect()
    assert tried(one, [(EARLIER, 0, 0), (LATER, 64, 0)]) == (0, None)
    assert not one.is_overtaken


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        pytest.param([(0, 8)], [(4, 12)], [(4, 8)], id="a-part"),
        pytest.param([(0, 8)], [(8, 12)], [], id="neighbours"),
        pytest.param([(4, 6)], [(0, 100), (1, 2)], [(4, 6)], id="within"),
        pytest.param([(0, 2), (50, 60)], [(0, 1), (55, 99)], [(0, 1), (55, 60)], id="two"),
    ],
)
def test_common_bytes(a, b, shared):
    assert common(a, b) == shared


def test_a_program_goes_on_where_there_is_no_memory_to_compare(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    short = suspect(is_later_on_host=True)
    trial = DeviceTrial(short, SimpleNamespace())
    trial._end = SimpleNamespace(query=lambda: False)
    monkeypatch.setattr(trial, "_common", lambda issued: [torch.ones(8)])

    def no_memory(tensor):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trial, "_copy", no_memory)
    assert trial.compared(Issued("op", False), lambda: "result") == "result"
    assert (short.is_short, short.is_confirmed) == (True, False)

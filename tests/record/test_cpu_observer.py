"""Ends of asynchronous calls of CPU tensors."""

from functools import partial

from aorta.device.marks import HostClock
from aorta.record.cpu_observer import CpuObserver
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Group


class Future:
    def add_done_callback(self, callback):
        callback(self)

    def value(self):
        return None


class Work:
    """Work of a backend's function; counts how often anybody asked for its future."""

    num_asked = 0

    def __init__(self, has_future):
        self.has_future = has_future

    def get_future(self):
        Work.num_asked += 1
        if not self.has_future:
            raise RuntimeError("Work::getFuture not implemented.")
        return Future()


def through(name, has_future):
    return Work(has_future)


def reduce_scatter():
    return Work(True)


def test_a_function_whose_works_have_no_future_is_asked_once():
    """The error holds the stack of C++, and costs more than the call."""
    observer, group = CpuObserver(Journal(), HostClock()), Group("0", "default", [0, 1], "gloo")

    def ends_unseen(launch):
        call = CollectiveCall(group, "reduce_scatter", 64, "float32", True)
        observer._time_completion(launch(), call, launch)
        return call.ends_unseen

    lists = partial(through, "reduce_scatter_tensor_coalesced_", False)
    others = partial(through, "allgather_into_tensor_coalesced_", True)
    launches = [lists, others, lists, partial(reduce_scatter), lists, others]
    Work.num_asked = 0
    assert [ends_unseen(launch) for launch in launches] == [True, False, True, False, True, False]
    assert Work.num_asked == 4

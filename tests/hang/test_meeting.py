"""Ranks that count themselves in and out through a store."""

import threading
import time

from torch._C._distributed_c10d import HashStore

from aorta.hang.meeting import Meeting
from tests.limits import AT_ONCE_S, LIMIT_S


def test_the_first_calls_the_others_and_all_leave_together() -> None:
    store = HashStore()
    early, late = Meeting(store, 2), Meeting(store, 2)
    assert not late.is_called()
    assert early.count_in() == 1
    assert late.is_called()
    assert late.count_in() == 2
    assert not late.is_called()  # the next hang is another one
    assert early.wait_for_all(5.0) == 2
    left: list[str] = []

    def leave() -> None:
        early.leave_together(2, LIMIT_S)
        left.append("early")

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join(0.3)
    assert left == []
    late.leave_together(2, LIMIT_S)
    thread.join(LIMIT_S)
    assert left == ["early"]


def test_who_does_not_come_is_not_waited_for_longer_than_the_limit() -> None:
    meeting = Meeting(HashStore(), 2)
    meeting.count_in()
    started_s = time.monotonic()
    assert meeting.wait_for_all(0.3) == 1
    meeting.leave_together(2, 0.3)
    assert time.monotonic() - started_s < AT_ONCE_S


def test_without_a_store_every_rank_is_the_first() -> None:
    meeting = Meeting(None, 8)
    assert not meeting.is_called()
    assert meeting.count_in() == 1
    assert meeting.wait_for_all(60.0) == 1
    meeting.leave_together(1, 60.0)


def test_a_pause_of_a_rank_that_is_further_is_not_waited_for() -> None:
    """Its checkpoint may wait for the device, which waits for this rank."""
    store = HashStore()
    pausing, waiting = Meeting(store, 2, rank=1), Meeting(store, 2, rank=0)
    assert not waiting.waits_for_pause(19)
    pausing.count_pause(1, place=20)
    assert not waiting.waits_for_pause(19)
    assert waiting.waits_for_pause(20)
    assert waiting.waits_for_pause(21)
    pausing.count_pause(-1)
    assert not waiting.waits_for_pause(21)


def test_a_rank_that_waits_for_one_that_has_announced_a_pause_waits_on() -> None:
    store = HashStore()
    pausing, waiting = Meeting(store, 2), Meeting(store, 2)
    pausing.count_pause(1)
    assert waiting.num_pausing() == 1
    pausing.count_pause(-1)
    assert waiting.num_pausing() == 0

"""Announcements of rank 0, in a store that holds the keys of attempts before."""

import threading

import torch.distributed as dist

from aorta import processes
from aorta.record.run_folder import announce, announced, asking_agents


def test_every_attempt_hears_its_own_rank_0():
    store = dist.HashStore()
    for attempt in range(3):
        heard: dict[int, str] = {}

        def ask(rank: int, heard: dict[int, str] = heard) -> None:
            heard[rank] = announced(store, rank)

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in (1, 2)]
        threads[0].start()
        announce(store, 3, f"attempt {attempt}")
        threads[1].start()
        for thread in threads:
            thread.join(30)
        assert heard == {1: f"attempt {attempt}", 2: f"attempt {attempt}"}


def test_a_rank_that_asked_in_an_attempt_before_is_asked_again():
    """It died before it was told; its question is still in the store."""
    store = dist.HashStore()
    dist.PrefixStore("aorta/announced", store).set("asks/1", "of-before")
    announce(store, 2, "now")
    assert announced(store, 1) == "now"


def test_rank_0_hears_by_which_agents_the_others_were_started():
    store = dist.HashStore()
    asking = threading.Thread(target=announced, args=(store, 1, "host-a 5"), daemon=True)
    asking.start()
    assert asking_agents(store, 2) == {"host-a 5"}
    announce(store, 2, "word")
    asking.join(30)
    assert not asking.is_alive()


def test_python_ends_with_no_thread_that_asks_the_store():
    """One that comes back from C++ then aborts the process."""
    announce(dist.HashStore(), 2, "nobody asks")
    try:
        processes._join_asking_threads()
        assert "aorta-announce" not in {thread.name for thread in threading.enumerate()}
    finally:
        processes.python_ends.clear()

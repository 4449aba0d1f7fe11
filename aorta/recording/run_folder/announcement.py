"""What rank 0 has to say, in a store that may still hold the keys of an earlier attempt of the job.

torchrun keeps one store over its restarts, and does not count all of them. So no key is believed that may be
of before: a rank asks under a name that it has drawn by lot, and rank 0 answers under that name.
"""

import secrets
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

PATIENCE = timedelta(minutes=5)
"""With a rank 0 that comes late, or ranks that do."""
ASKING = timedelta(minutes=1)
"""From rank 0's claim of the folder to the others' questions."""


def announce(store: Store, world_size: int, word: str) -> None:
    """Rank 0 tells the others, each once it asks. Returns at once: a thread answers."""
    thread = threading.Thread(
        target=_answer, args=(own_connection(store), world_size, word), name="aorta-announce", daemon=True
    )
    thread.start()


def announced(store: Store, rank: int, agent: str | None = None) -> str:
    """What rank 0 of this very attempt announces. torch's DistStoreError where it does not come.

    agent: what started this rank, for rank 0 to know.
    """
    store = PrefixStore("aorta/announced", store)
    name = secrets.token_hex(8)
    store.set(f"asks/{rank}", f"{name}\n{agent or ''}")
    store.wait([f"told/{name}"], PATIENCE)
    lot, _, word = store.get(f"told/{name}").decode().partition("\n")
    store.set(f"heard/{lot}/{rank}", "")
    return word


def asking_agents(store: Store, world_size: int) -> set[str]:
    """Of the other ranks, as they come to ask. Those of an earlier attempt that left its keys in the store
    count too: whoever has the same store is of the same job."""
    keys = [f"asks/{rank}" for rank in range(1, world_size)]
    store = PrefixStore("aorta/announced", own_connection(store))
    with suppress(RuntimeError):  # some do not come
        store.wait(keys, ASKING)
        return {store.get(key).decode().partition("\n")[2] for key in keys} - {""}
    return set()


def own_connection(store: Store) -> Store:
    """One connection answers one question at a time, and another thread may wait in it."""
    with suppress(RuntimeError, NotImplementedError, AttributeError):
        return store.clone()  # type: ignore[attr-defined,no-any-return]
    return store


def _answer(store: Store, world_size: int, word: str) -> None:
    lot = secrets.token_hex(8)
    word_sent: dict[int, str] = {}
    missing = set(range(1, world_size))
    end_s = time.monotonic() + 2 * PATIENCE.total_seconds()
    wait_s = 0.005
    with suppress(RuntimeError):  # the store is gone, and with it the job
        store = PrefixStore("aorta/announced", store)
        while missing and time.monotonic() < end_s:
            for rank in sorted(missing):
                if store.check([f"heard/{lot}/{rank}"]):
                    missing.remove(rank)
                elif store.check([f"asks/{rank}"]):
                    name = store.get(f"asks/{rank}").decode().partition("\n")[0]
                    if word_sent.get(rank) != name:
                        word_sent[rank] = name
                        store.set(f"told/{name}", f"{lot}\n{word}")
            if missing:
                time.sleep(wait_s)
                wait_s = min(0.2, wait_s * 1.3)

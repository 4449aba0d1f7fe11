"""The agreement on the last step, with threads for ranks and a store in memory."""

import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import aorta.training.stop as stop_module
from aorta.training.stop import StopAgreement
from tests.limits import LIMIT_S


def run_world(
    world_size: int, num_steps: int, do_step, request_after_s: float | None, num_before: int = 1
) -> list[int]:
    """Steps that each rank did. Rank 0 is asked to stop that long after its first num_before steps."""
    reached = threading.Event()

    def run_rank(stop: StopAgreement, rank: int) -> None:
        step = 0
        while step < num_steps and stop.may_start(step):
            do_step(rank, step)
            step += 1
            if rank == 0 and step == num_before:
                reached.set()
        done[rank] = step

    store = dist.HashStore()
    stops = [StopAgreement(store, rank, world_size, poll_s=0.01) for rank in range(world_size)]
    done = [-1] * world_size
    threads = [
        threading.Thread(target=run_rank, args=(stop, rank), daemon=True) for rank, stop in enumerate(stops)
    ]
    for stop in stops:
        # Entered on another thread, so that the signal handlers of the test run stay as they are.
        entering = threading.Thread(target=stop.__enter__)
        entering.start()
        entering.join()
    for thread in threads:
        thread.start()
    if request_after_s is not None:
        assert reached.wait(LIMIT_S)
        time.sleep(request_after_s)
        stops[0].request(signal.SIGTERM)
    for thread in threads:
        thread.join(timeout=LIMIT_S)
    for stop in stops:
        stop.__exit__(None, None, None)
    return done


def test_without_a_request_all_steps_are_done():
    assert run_world(3, 50, lambda rank, step: None, None) == [50, 50, 50]


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_run_ahead_stop_at_the_same_step(seed):
    """No collectives: the fastest rank is hundreds of steps ahead when the request comes."""
    pause_s = [random.Random(seed * 10 + rank).uniform(0.0001, 0.004) for rank in range(4)]
    done = run_world(4, 100_000, lambda rank, step: time.sleep(pause_s[rank]), 0.2)
    assert len(set(done)) == 1
    assert 0 < done[0] < 100_000


def test_ranks_that_wait_for_each_other_in_every_step_do_not_deadlock():
    barriers = threading.Barrier(3)

    def collective(rank: int, step: int) -> None:
        time.sleep(0.002 * rank)
        barriers.wait(timeout=LIMIT_S)

    done = run_world(3, 100_000, collective, 0.1)
    assert len(set(done)) == 1
    assert 0 < done[0] < 100_000


def test_a_request_when_a_rank_has_finished_changes_nothing():
    done = run_world(2, 20, lambda rank, step: time.sleep(0.02 * rank), 0.0, num_before=20)
    assert done == [20, 20]


def test_without_an_answer_from_a_dead_rank_the_others_exit(monkeypatch):
    """Their loops hang in a collective with it, so the side thread has to."""
    monkeypatch.setattr(stop_module, "_AGREE_S", 0.1)
    exits: list[int] = []
    stop = StopAgreement(dist.HashStore(), 0, 2, poll_s=0.01, exit_now=exits.append)
    entering = threading.Thread(target=stop.__enter__)
    entering.start()
    entering.join()
    stop.may_start(0)
    stop.request(signal.SIGTERM)
    deadline_s = time.monotonic() + LIMIT_S
    while not exits and time.monotonic() < deadline_s:
        time.sleep(0.01)
    stop.__exit__(None, None, None)
    assert exits[0] == 128 + signal.SIGTERM


SIGNALLED_TWICE = """
import signal, sys, threading, time
import torch.distributed as dist
from aorta.training.stop import StopAgreement
with StopAgreement(dist.HashStore(), 0, 2, poll_s=0.05) as stop:
    stop.may_start(0)
    print("ready", flush=True)
    threading.Lock().acquire() and threading.Semaphore(0).acquire()  # as if blocked in a collective
"""


def test_a_second_signal_exits_at_once_even_while_the_main_thread_is_blocked():
    command = [sys.executable, "-c", SIGNALLED_TWICE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline().endswith("stopping soon; again to exit now\n")
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.endswith("exiting now\n")


def test_a_ctrl_c_that_the_launcher_passes_on_is_no_second_one(monkeypatch):
    exits: list[int] = []
    stop = StopAgreement(dist.HashStore(), 0, 1, exit_now=exits.append)
    for now_s, num_exits in [(10.0, 0), (10.4, 0), (10.6, 1)]:
        monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        stop._signalled(signal.SIGINT)
        assert len(exits) == num_exits

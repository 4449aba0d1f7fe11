"""Workers of a DataLoader tell what they do; the program notices nothing, whatever fails."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from aorta.record import loader_workers
from aorta.record.loader_workers import SampledLoop, page
from aorta.records.files import workers_name
from aorta.records.workers import AWAITED, WORKER_STATES, read_workers
from tests.dist.launch import run_python
from tests.limits import LIMIT_S

PROGRAM = """
import json, multiprocessing, os, random, signal, sys, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

def slow_line(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(2000))

class Clean(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((4,), float(index))

class Slow(Clean):
    def __getitem__(self, index):
        slow_line(0.01)
        return super().__getitem__(index)

class Spawned(Slow):
    pass

class Served(Slow):
    pass

class Draws(Slow):
    def __getitem__(self, index):
        return super().__getitem__(index) + float(np.random.standard_normal()) + random.random()

class Raises(Slow):
    def __getitem__(self, index):
        if index == 50:
            raise ValueError("a bad row")
        return super().__getitem__(index)

class Killed(Slow):
    def __getitem__(self, index):
        if index == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, 96, info.num_workers):
            slow_line(0.01)
            yield torch.full((4,), float(index))

def train(data, context, persistent, epochs):
    torch.manual_seed(3)
    np.random.seed(3)
    torch.set_num_threads(1)
    more = dict(multiprocessing_context=context, persistent_workers=persistent == "persistent")
    loader = DataLoader(data, batch_size=4, num_workers=2, **more)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    seen = 0.0
    for _ in range(int(epochs)):
        for batch in loader:
            seen += float(batch.double().sum())
            model(batch).mean().backward()
            optimizer.step()
            if type(data) is Clean:
                slow_line(0.005)
    print(json.dumps([seen, torch.rand(()).item(), random.Random(1).random()]), flush=True)

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch"])  # once, instead of in each of its workers
    for word in sys.argv[1:]:
        name, *how = word.split(",")
        train(globals()[name](), *how)
"""
SLOW = {
    "Slow": "Slow,fork,persistent,2",
    "Spawned": "Spawned,spawn,persistent,2",
    "Served": "Served,forkserver,anew,2",
    "Stream": "Stream,fork,anew,2",
}


def trained(folder: Path, *words: str, options: tuple[str, ...] = (), is_recorded: bool = True):
    """What the program did that reads these data sets in turn, and the file of its workers."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    run = folder / "run"
    if not is_recorded:
        return run_python(script, *words), None
    record = [sys.executable, "-m", "aorta", "run", "--no-report", "-o", str(run), *options, "--"]
    command = [*record, sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done, run / workers_name(0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The file of a program whose workers do as they should."""
    done, path = trained(tmp_path_factory.mktemp("recorded"), *SLOW.values(), "Clean,fork,persistent,8")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def plain_and_recorded(tmp_path_factory):
    """A program whose last worker raises, without aorta and with it; the file of its workers."""
    folder, words = tmp_path_factory.mktemp("raises"), ("Draws,fork,anew,2", "Raises,fork,anew,1")
    return trained(folder, *words, is_recorded=False)[0], *trained(folder, *words)


def of_data(path, name):
    return [one for one in read_workers(path) if one.dataset == name]


def lines_of(chunks, state="fetches"):
    """Samples by the innermost line of the program."""
    found: dict[str, int] = {}
    for chunk in chunks:
        for one in chunk.samples:
            if WORKER_STATES[one.state] == state:
                own = [frame for frame in chunk.frames_of(one) if frame.is_program]
                name = own[-1].function if own else ""
                found[name] = found.get(name, 0) + one.num
    return found


@pytest.mark.parametrize("name", SLOW)
def test_the_slow_line_of_a_data_set_is_found(recorded, name):
    chunks = of_data(recorded, name)
    lines = lines_of(chunks)
    assert 2 * lines.get("slow_line", 0) > sum(lines.values())  # others are seen too, where cores are scarce
    assert {one.num_workers for one in chunks} == {2}
    assert {one.worker for one in chunks} == {0, 1}
    assert sum(one.us_of("fetches") for one in chunks) > 0
    assert {one.draws for one in chunks} == {False}
    below_the_loop = [
        one.frames_of(sample)[0] for one in chunks for sample in one.samples if sample.node >= 0
    ]
    assert "train" not in {frame.function for frame in below_the_loop}  # what a forked worker began in


def test_random_numbers_of_a_data_set_are_told_and_left_as_they_are(plain_and_recorded):
    plain, recorded, path = plain_and_recorded
    assert recorded.stdout.splitlines()[0] == plain.stdout.strip()
    assert any(one.draws for one in of_data(path, "Draws"))


def test_workers_that_keep_up_wait(recorded):
    chunks = of_data(recorded, "Clean")
    us = {
        name: sum(one.us for chunk in chunks for one in chunk.samples if WORKER_STATES[one.state] == name)
        for name in WORKER_STATES
    }
    assert us["waits"] > us["fetches"]
    assert "slow_line" not in lines_of(chunks)


def test_an_exception_of_a_worker_is_as_without(plain_and_recorded):
    plain, recorded, _ = plain_and_recorded
    assert recorded.returncode == plain.returncode != 0
    assert "a bad row" in plain.stderr
    assert "a bad row" in recorded.stderr
    assert "loader_workers" not in recorded.stderr


def test_the_end_of_a_worker_that_is_killed_is_as_without(tmp_path):
    """Who notices first says so, with or without aorta: torch's handler of the signal, wherever Python is
    then, or the end of the pipe."""
    plain, _ = trained(tmp_path, "Killed,fork,anew,1", is_recorded=False)
    recorded, _ = trained(tmp_path, "Killed,fork,anew,1")
    assert recorded.returncode == plain.returncode != 0
    assert "loader_workers" not in recorded.stderr


def test_without_stacks_workers_are_not_sampled(tmp_path):
    done, path = trained(tmp_path, "Slow,fork,anew,1", options=("--stacks", "off"))
    assert done.returncode == 0, done.stderr
    assert not path.exists()


def test_all_lines_are_read_and_hold_nothing_of_the_programs_data(recorded):
    assert {one.dataset for one in read_workers(recorded)} == {*SLOW, "Clean"}
    for line in recorded.read_text().splitlines():
        told = json.loads(line)
        assert {*told} <= {
            *("run_id", "iterator", "worker", "num_workers", "dataset", "frames", "nodes", "samples"),
            *("num_batches", "draws", "cpu_s", "elapsed_s", "line", "crc32"),
        }
        assert all(len(frame) == 4 for frame in told.get("frames", []))


def test_damaged_lines_take_no_others_with_them(recorded, tmp_path):
    lines = recorded.read_bytes().splitlines(keepends=True)
    whole = read_workers(recorded)
    path = tmp_path / recorded.name
    path.write_bytes(
        lines[0][:40] + b"\n" + lines[1].replace(b'"num_workers":2', b'"num_workers":3') + b"".join(lines[2:])
    )
    assert len(whole) == len(lines) > 2
    assert read_workers(path) == whole[2:]
    assert read_workers(path, run_id="another") == []
    assert read_workers(tmp_path / "none") == []


class Queue:
    def __init__(self, *tasks):
        self.tasks = [*tasks]

    def get(self, timeout=None):
        return self.tasks.pop(0)


def loop(dataset_kind, dataset, index_queue, worker_id, num_workers, base_seed):
    """As torch's, in this process: what comes of it is what is given back."""
    found = []
    while (task := index_queue.get(timeout=1)) is not None:
        found.append(task)
        time.sleep(0.3)
    return found


def sampled(monkeypatch, tmp_path, name="workers.jsonl", **changes):
    ours = loader_workers.Page()
    ours.tell(tmp_path / name, None)
    ours.awaits(AWAITED)
    monkeypatch.setattr(loader_workers, "_page", ours)
    monkeypatch.setattr(os, "getppid", os.getpid)
    for name, value in changes.items():
        monkeypatch.setattr(loader_workers, name, value)
    return SampledLoop(loop)(0, [1], Queue((0, [1]), (1, [2]), None), 0, 2, 7)


def broken(*_):
    raise RuntimeError("broken")


def test_the_loop_goes_on_without_a_sampler_that_fails(monkeypatch, tmp_path):
    whole = [(0, [1]), (1, [2])]
    assert sampled(monkeypatch, tmp_path) == whole
    assert sum(one.us_of("fetches") for one in read_workers(tmp_path / "workers.jsonl")) > 300_000
    (tmp_path / "workers.jsonl").unlink()
    assert sampled(monkeypatch, tmp_path, WorkerSampler=broken) == whole
    assert not (tmp_path / "workers.jsonl").exists()


@pytest.mark.parametrize("name", ["_random_states", "encoded", "regular_descriptor"])
def test_a_part_that_fails_is_silent(monkeypatch, tmp_path, capfd, name):
    assert sampled(monkeypatch, tmp_path, **{name: broken}) == [(0, [1]), (1, [2])]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["", "none/workers.jsonl"])
def test_a_file_that_cannot_be_written_is_no_matter(monkeypatch, tmp_path, capfd, name):
    assert sampled(monkeypatch, tmp_path, name) == [(0, [1]), (1, [2])]
    assert capfd.readouterr() == ("", "")
    assert [*tmp_path.iterdir()] == []


def test_workers_of_another_process_than_the_pages_are_left_alone(monkeypatch, tmp_path):
    ours = loader_workers.Page()
    ours.tell(tmp_path / "workers.jsonl", None)
    monkeypatch.setattr(loader_workers, "_page", ours)
    assert SampledLoop(loop)(0, [1], Queue((0, [1]), None), 0, 2, 7) == [
        (0, [1])
    ]  # the parent is another one
    assert not (tmp_path / "workers.jsonl").exists()


def test_reading_random_states_changes_none():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = loader_workers._random_states()
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert loader_workers._random_states() == before
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn
    assert loader_workers._random_states() != before


def test_a_forked_process_has_a_page_of_its_own():
    before = page()
    child = os.fork()
    if child == 0:
        os._exit(0 if page() is not before and page().pid == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert page() is before


def test_torchs_functions_are_put_back(tmp_path):
    from torch.utils.data import dataloader
    from torch.utils.data._utils import worker

    import aorta

    before = worker._worker_loop, dataloader._MultiProcessingDataLoaderIter._next_data
    with aorta.instrument(tmp_path / "run"):
        assert isinstance(worker._worker_loop, SampledLoop)
        assert worker._worker_loop.__name__ == "_worker_loop"
    assert (worker._worker_loop, dataloader._MultiProcessingDataLoaderIter._next_data) == before

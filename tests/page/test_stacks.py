"""The page's section on stacks: what it holds, and how large it gets."""

import random

import msgspec
import pytest

from aorta.page.html import page
from aorta.page.stacks import MAX_NODES, stack_data, stacks
from aorta.records.stacks import StackFrame
from tests.account.judge.sampled_runs import AUGMENT, BACKWARD, MAIN, SLEEP, sampled, sampled_dataset
from tests.account.reports_in_memory import dataset_of, records_of, report_of

STEPS = range(2, 12)


def late():
    work = [(step, 20_000, "runs", MAIN, BACKWARD) for step in STEPS]
    sleep = [(step, 10_000, "sleeps", MAIN, AUGMENT, SLEEP) for step in STEPS]
    return sampled_dataset([sampled(*work), sampled(*work, *sleep)])


def test_a_tree_with_the_time_of_each_rank():
    (data,) = stack_data(report_of(late()))
    assert data["parents"] == [-1, 0, 1, 1, 3]
    names = [data["frames"][node][0] if node >= 0 else "" for node in data["nodes"]]
    assert names == [
        "",
        "main(), train.py:20",
        "Tensor.backward of torch",
        "augment(), data.py:5",
        "sleep of time",
    ]
    assert data["asleep"] == [0, 0, 0, 0, 1]
    quiet, sleepy = data["us"]
    assert quiet[4] == 0
    assert abs(2 * sleepy[4] - sleepy[2]) <= 2  # a third of the step beside two thirds


def test_lines_are_there_without_a_script():
    text = stacks(report_of(late()))
    assert "augment(), data.py:5" in text
    assert "sleeps in sleep of time" in text


def test_a_run_without_samples_has_no_such_section():
    report = report_of(dataset_of("a", records_of(num_steps=6)))
    assert stack_data(report) == []
    assert stacks(report) is None


@pytest.mark.heavy
def test_many_stacks_of_eight_ranks_stay_small():
    """Each rank has 400 stacks of its own, of six frames: under 250 kB, whatever was sampled."""
    draw = random.Random(0)

    def many(rank):
        for i in range(400):
            deep = [StackFrame(f"/job/layers_{d}.py", draw.randrange(300), "forward", True) for d in range(5)]
            yield (2 + i % 10, 1000 + rank, "runs", MAIN, *deep)

    report = report_of(sampled_dataset([sampled(*many(rank)) for rank in range(8)]))
    (data,) = stack_data(report)
    assert len(data["nodes"]) == MAX_NODES
    assert len(msgspec.json.encode(data)) < 250_000
    assert "stacks-chart" in page(report)

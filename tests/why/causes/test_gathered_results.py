"""Results that are gathered for a metric are told to be reduced before; what an update learns from is not."""

import msgspec
import pytest

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.records.files import sites_name, stacks_name
from aorta.records.schema import CallSite, CallSites
from aorta.records.stacks import DOING, PLACES, STACK_PHASES, StackChunk, StackFrame, StackSample
from tests.records.run_folders import run_record
from tests.why.causes.runs import MIB, STEPS, Host, causes, run_of

TRAIN, LOOP, BACKWARD = "/job/train.py", 20, 24
SIZE = 60 * MIB


def told(folder, make, line, parameters=4 * MIB):
    """The cause of what is gathered in this line."""
    program = {"optimizers": [{"kind": "SGD", "parameter_bytes": parameters, "num_parameters": 8}]}
    run_of(folder, make, msgspec.structs.replace(run_record(2), program=program))
    site = {"file": TRAIN, "line": line, "function": "main", "is_program": True}
    site = CallSite(**site, op="all_gather", moves="a tensor", num_calls=4, bytes=4 * SIZE)
    frames = [
        StackFrame(TRAIN, LOOP, "<module>", True),
        StackFrame(TRAIN, BACKWARD, "main", True),
        StackFrame("torch", 0, "Tensor.backward", False),
        StackFrame(TRAIN, line, "main", True),
        StackFrame("torch", 0, "all_gather", False),
        StackFrame("", 0, "Tensor.argmax", False),
    ]
    stacks = [("backward", 2, 15.0), ("communication", 4, 20.0), ("rest", 5, 6.0)]
    samples = [
        StackSample(
            step,
            PLACES.index("body"),
            STACK_PHASES.index(phase),
            DOING.index("runs"),
            node > 2,
            node,
            int(1e3 * ms),
        )
        for step in range(STEPS)
        for phase, node, ms in stacks
    ]
    nodes = [(-1, 0), (0, 1), (1, 2), (0, 3), (3, 4), (3, 5)]
    for rank in range(2):
        (folder / sites_name(rank)).write_bytes(msgspec.json.encode(CallSites(num_steps=4, sites=[site])))
        chunk = StackChunk(begins=True, frames=frames, nodes=nodes, samples=samples)
        (folder / stacks_name(rank)).write_bytes(msgspec.json.encode(chunk) + b"\n")
    return causes(judge(load_run(folder, "run")))


def passes(host, noise):
    return host.work(15.0 * noise.gauss(1, 0.01)).work(15.0, "backward")


def behind_the_update(rank, step, noise):
    host = passes(Host(), noise).work(1.0, "optimizer", "SGD")
    return host.comm(20.0, op="all_gather", size=SIZE, phase="optimizer").after(6.0)


def before_the_update(rank, step, noise):
    host = passes(Host(), noise).comm(20.0, op="all_gather", size=SIZE, phase="optimizer")
    return host.work(1.0, "optimizer", "SGD").after(6.0)


def in_the_next_step(rank, step, noise):
    """Where no loader tells where a step begins, it begins behind the update."""
    host = Host().comm(20.0, op="all_gather", size=SIZE, phase="forward").work(6.0)
    return passes(host, noise).work(1.0, "optimizer", "SGD")


@pytest.mark.parametrize(
    ("make", "line"), [(behind_the_update, 30), (in_the_next_step, 30), (behind_the_update, 21)]
)
def test_results_gathered_behind_the_update_are_to_be_reduced_before(tmp_path, make, line):
    first, *others = told(tmp_path / "run", make, line)
    assert first.kind == "transfer"
    assert first.origin == "results"
    assert f"at main(), train.py:{line}" in first.change
    assert "argmax, sums, counts" in first.change
    assert "60.0 MiB of results" in first.change
    assert not [one for one in others if one.line is not None and one.line.line == line]


def test_what_is_computed_of_them_goes_with_them(tmp_path):
    """20 ms of the gather, and 6 ms behind it in its line."""
    first = told(tmp_path / "run", behind_the_update, 30)[0]
    assert first.ms == pytest.approx(26.0, rel=0.02)
    low, high = first.interval_ms
    assert low < 26.0 < high


@pytest.mark.parametrize(
    ("make", "line", "parameters"),
    [
        pytest.param(in_the_next_step, 22, 4 * MIB, id="a-loss-is-made-of-them"),
        pytest.param(before_the_update, 30, 4 * MIB, id="gradients"),
        pytest.param(behind_the_update, 30, SIZE, id="weights"),
    ],
)
def test_what_an_update_may_learn_from_is_not_told_to_be_reduced(tmp_path, make, line, parameters):
    found = told(tmp_path / "run", make, line, parameters)
    assert [one.origin for one in found if one.kind == "transfer"] == ["own"]

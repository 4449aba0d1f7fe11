"""Reading of rank_<n>_stacks.jsonl: several attempts, damaged lines."""

import msgspec

from aorta.records.stacks import StackChunk, StackFrame, StackSample, joined, read_stacks

MAIN = StackFrame("/job/train.py", 9, "main", is_program=True)
AUGMENT = StackFrame("/job/train.py", 5, "augment.<locals>.<listcomp>", is_program=True)
BACKWARD = StackFrame("torch", 0, "Tensor.backward", is_program=False)


def sample(step, node, us=50_000):
    return StackSample(step, 0, 0, 0, False, node, us)


def first(*samples, attempt=0):
    return StackChunk(
        begins=True, attempt=attempt, frames=[MAIN, AUGMENT], nodes=[(-1, 0), (0, 1)], samples=[*samples]
    )


def read(folder, *lines):
    path = folder / "rank_0_stacks.jsonl"
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else msgspec.json.encode(line) + b"\n" for line in lines)
    )
    return joined(read_stacks(path))


def test_later_lines_go_on_where_earlier_ones_end(tmp_path):
    later = StackChunk(frames=[BACKWARD], nodes=[(0, 2)], samples=[sample(2, 2)])
    stacks = read(tmp_path, first(sample(1, 1)), later)
    assert [stacks.path(entry.node) for entry in stacks.samples] == [[MAIN, AUGMENT], [MAIN, BACKWARD]]


def test_a_step_that_ran_twice_has_the_samples_of_its_last_attempt(tmp_path):
    stacks = read(tmp_path, first(sample(1, 1), sample(2, 1, us=1)), first(sample(2, 0, us=2), attempt=1))
    assert [(entry.global_step, entry.us) for entry in stacks.samples] == [(1, 50_000), (2, 2)]
    assert stacks.path(stacks.samples[1].node) == [MAIN]


def test_what_stands_before_a_damaged_line_holds(tmp_path):
    whole = first(sample(1, 1))
    unknown = StackChunk(samples=[sample(2, 99)])
    for damaged in (b'{"samples": [[3,\n', b"\xff\n", unknown, b'{"nodes": [[7, 0]]}\n'):
        stacks = read(tmp_path, whole, damaged, StackChunk(samples=[sample(3, 0)]))
        assert [entry.global_step for entry in stacks.samples] == [1]


def test_a_run_without_stacks_has_none(tmp_path):
    assert joined(read_stacks(tmp_path / "rank_0_stacks.jsonl")).samples == []


def test_frames_in_words():
    assert [frame.text for frame in (MAIN, AUGMENT, BACKWARD)] == [
        "main(), train.py:9",
        "augment(), train.py:5",
        "Tensor.backward of torch",
    ]
    assert StackFrame("/job/train.py", 3, "<module>", is_program=True).text == "train.py:3"

"""Collectives of a step that is not recorded: counted by backends, told apart by torch's flight recorder."""

import pickle

import torch
import torch.distributed as dist

import aorta
from aorta.hang.last_calls import CallCounts, LastCalls, read_counts
from aorta.hang.report import CallState, GroupState
from aorta.hang.standing import flight_record, group_states, with_unseen
from aorta.steps.notes import CollectiveCall, Group, RecordedStep
from tests.record.sampled import record_every

NOTED = CallState(
    seq=4, op="all_gather", bytes=64, dtype="float32", step=3, started=True, finished=None, age_s=1.0
)
GROUP = GroupState(key="0", name="default", ranks=[0, 1], backend="nccl", num_seen=5, calls=[NOTED])


def entry(number, name, *, retired, state="scheduled", created_ns=0, group="0", sizes=((16,),)):
    return {
        "process_group": (group, "default_pg"), "collective_seq_id": number, "op_id": 2 * number,
        "is_p2p": False,
        "profiling_name": name, "retired": retired, "state": state, "time_created_ns": created_ns,
        "input_sizes": [list(size) for size in sizes], "output_sizes": [[4]],
        "input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"],
    }  # fmt: skip


def test_calls_after_the_last_that_was_seen_are_numbered_on_and_have_their_step():
    record = pickle.dumps(
        {
            "entries": [
                entry(8, "nccl:all_gather", retired=True, created_ns=50),
                entry(9, "nccl:_all_gather_base", retired=True, created_ns=150),
                entry(10, "nccl:all_reduce", retired=False, created_ns=260),
                entry(11, "nccl:all_reduce", retired=False, created_ns=270, group="7"),
            ]
        }
    )
    (group,) = with_unseen([GROUP], {"0": (8, 2)}, record, [(100, 4), (200, 5), (300, 6)])
    assert group.num_seen == 7
    calls = [(call.seq, call.op, call.step, call.started, call.finished) for call in group.calls]
    assert calls == [
        (4, "all_gather", 3, True, True),
        (5, "all_gather", 4, True, True),
        (6, "all_reduce", 5, None, False),
    ]
    assert (group.calls[-1].bytes, group.calls[-1].dtype) == (32, "bfloat16")


def test_without_a_flight_recorder_their_number_is_known():
    (group,) = with_unseen([GROUP], {"0": (8, 2)}, b"", [(100, 4)])
    assert (group.num_seen, len(group.calls)) == (7, 1)


def test_torch_s_own_record_of_a_step_that_is_not_recorded_is_read(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with record_every(aorta.instrument(tmp_path), 2) as recorder:
            with recorder.step():
                dist.all_reduce(torch.ones(4))
            with recorder.step():
                assert recorder.unseen() == {"0": (1, 0)}
                dist.broadcast(torch.ones(8), 0)
                states = group_states(recorder.journal, [])
                (group,) = with_unseen(states, recorder.unseen(), flight_record(), [(0, 1)])
            with recorder.step():
                assert recorder.unseen() == {}
    finally:
        dist.destroy_process_group()
    assert group.num_seen == 2
    if len(group.calls) > 1:  # torch before 2.13 keeps no record of gloo
        assert (group.calls[-1].seq, group.calls[-1].op, group.calls[-1].bytes) == (1, "broadcast", 32)


def test_what_was_kept_for_a_silent_rank_does_not_outlive_the_steps_that_are_seen(tmp_path):
    """An old number would say that the rank is far behind."""
    call = CollectiveCall(Group("0", "default", [0, 1], "gloo"), "all_reduce", 4, "float32", False, seq=6)
    step = RecordedStep(3, 3, 0, None)
    counts, last = CallCounts(tmp_path / "counts"), LastCalls(tmp_path / "calls")
    for kept in (counts, last):
        kept.note(step, call)
    assert read_counts(tmp_path / "counts")["0"].num_seen == 7
    for kept in (counts, last):
        kept.forget()
    assert read_counts(tmp_path / "counts") == {}
    assert not (tmp_path / "calls").read_bytes().strip(b"\0")
    counts.note(step, call)
    assert read_counts(tmp_path / "counts")["0"].num_seen == 7

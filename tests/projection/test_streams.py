import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.projection.streams import Contention, StreamTask, run


def test_communication_beside_compute_is_hidden():
    found = run([StreamTask("compute", "a", "gemm", 3.0), StreamTask("ag", "g", "dp", 2.0)])
    assert found.total_s == 3.0
    assert found.stalled_s == {}


def test_wait_is_named_after_what_it_waits_for():
    found = run(
        [StreamTask("ag", "g", "dp", 2.0), StreamTask("compute", "a", "gemm", 3.0, dependencies=(0,))]
    )
    assert found.total_s == 5.0
    assert found.stalled_s == {"dp": 2.0}


def test_tail_is_named_too():
    found = run(
        [StreamTask("compute", "a", "gemm", 3.0), StreamTask("rs", "g", "dp", 2.0, dependencies=(0,))]
    )
    assert found.stalled_s == {"dp": 2.0}


def test_both_are_slower_beside_each_other():
    # 4 s of compute at half the rate while 1 s of communication takes 2 s: 2 s do 1 s of work, 3 s are left.
    found = run(
        [StreamTask("compute", "a", "gemm", 4.0), StreamTask("ag", "g", "dp", 1.0)], Contention(2.0, 2.0)
    )
    assert found.end_s == pytest.approx([5.0, 2.0])
    assert found.slowed_s == pytest.approx(1.0)


@pytest.mark.heavy
@given(
    st.lists(
        st.tuples(st.sampled_from(["compute", "ag", "rs"]), st.floats(0, 5), st.integers(0, 8)),
        min_size=1,
        max_size=30,
    ),
    st.floats(1, 2),
    st.floats(1, 2),
)
def test_work_slowdown_and_stalls_add_up(rows, slow, slow_comm):
    tasks = [
        StreamTask(
            stream,
            str(i),
            stream,
            seconds,
            dependencies=tuple(range(max(0, i - back), max(0, i - back) + 1)) if i else (),
        )
        for i, (stream, seconds, back) in enumerate(rows)
    ]
    tasks = [
        task._replace(dependencies=tuple(a for a in task.dependencies if a < i))
        for i, task in enumerate(tasks)
    ]
    found = run(tasks, Contention(slow, slow_comm))
    parts = sum(found.compute_s.values()) + found.slowed_s + sum(found.stalled_s.values())
    assert parts == pytest.approx(found.total_s)

"""The check against planted hazards, against a slower check that knows every pair, and in size."""

import tracemalloc
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.hazards import check as check_module
from aorta.hazards.check import HazardCheck, play
from tests.hazards.planted import CASES, CLEAN, COMPUTE, NCCL, A, B, edge, new, op, waits


def found(log):
    return list(play(log, HazardCheck()).hazards.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.log.__name__)
def test_a_planted_hazard_is_found_with_the_order_that_it_lacks(case):
    assert {(hazard.kind, edge(hazard)) for hazard in found(case.log(0))} == {(case.kind, case.edge)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.log.__name__)
def test_its_mended_forms_are_clean(case):
    assert [found(case.log(form)) for form in range(1, case.num_mended + 1)] == [[]] * case.num_mended


@pytest.mark.parametrize("log", CLEAN, ids=lambda log: log.__name__)
def test_what_is_ordered_or_apart_is_no_hazard(log):
    assert found(log()) == []


def test_new_memory_that_a_side_stream_writes_before_its_last_owner_is_done():
    log = [new(A), op(COMPUTE, "last", [A]), ["free", A[0], "free"], new(A), op(NCCL, "recv", writes=[A])]
    (hazard,) = found(log)
    assert (hazard.kind, edge(hazard), hazard.earlier[1]) == ("reuse", (NCCL, COMPUTE), "last")


def test_memory_freed_too_early_without_pressure_is_latent_until_it_is_reused():
    log = [new(A), op(COMPUTE, "fill", writes=[A]), waits(NCCL, COMPUTE), op(NCCL, "send", [A])]
    log += [["free", A[0], "free"], new(B)]
    assert [hazard.kind for hazard in found(log)] == ["latent"]
    assert [hazard.kind for hazard in found([*log, new(A)])] == ["latent", "reuse"]
    assert [hazard.kind for hazard in found([*log, waits(COMPUTE, NCCL), new(A)])] == ["latent"]


def test_memory_that_an_empty_tensor_gets_is_followed_to_what_writes_it():
    """The tensor itself touches nothing, so that no delay of another operation could show a change there."""
    used = [new(A), op(COMPUTE, "fill", writes=[A]), waits(NCCL, COMPUTE), op(NCCL, "cast", [A])]
    again = [["allocate", *A, COMPUTE, None], op(COMPUTE, "look", [A]), op(COMPUTE, "refill", writes=[A])]
    (hazard, *_) = found([*used, ["free", A[0], "free"], *again])
    assert (hazard.kind, hazard.earlier[1], hazard.following) == ("reuse", "cast", "refill")


def test_a_graphs_own_race_is_found_once_at_its_capture():
    captured = [op(COMPUTE, "a", writes=[A]), op(NCCL, "b", [A])]
    log = [["capture", "g", captured], *[["replay", "g", COMPUTE, "r"]] * 5]
    assert [(edge(hazard), hazard.count) for hazard in found(log)] == [((NCCL, COMPUTE), 1)]


def test_the_same_two_sites_are_one_finding_with_its_count_and_first_step():
    once = [op(COMPUTE, "fill", writes=[A]), op(NCCL, "send", [A]), ["synchronize_all"]]
    log = [entry for step in (3, 4, 5) for entry in (["begin_step", step], *once)]
    assert [(hazard.count, hazard.first_step) for hazard in found(log)] == [(3, 3)]


def test_a_wait_that_came_too_early_or_for_itself_is_told():
    by_name = {case.log.__name__: found(case.log(0))[0].hint for case in CASES}
    assert by_name["event_recorded_too_early"] == ("early", "early record")
    assert by_name["waits_for_itself"][0] == "itself"
    assert by_name["work_dropped"] == ("", None)


def test_events_that_were_forgotten_order_at_least_as_much(monkeypatch):
    monkeypatch.setattr(check_module, "MAX_EVENTS", 32)
    log = [op(COMPUTE, "fill", writes=[A]), *[["record", number, COMPUTE] for number in range(100)]]
    assert found([*log, ["wait", NCCL, 0], op(NCCL, "send", [A])]) == []


def test_memory_whose_allocation_was_seen_to_wait_for_its_users_is_no_hazard():
    log = [new(A), waits(NCCL, COMPUTE), op(NCCL, "send", [A])]
    assert found([*log, ["free", A[0], "free", COMPUTE, True], new(A), op(COMPUTE, "x", writes=[A])]) == []


STREAMS = ("s", "t", "u")
CELLS = [(0, 1), (1, 1), (0, 2), (2, 2), (1, 2)]
OPERATIONS = st.one_of(
    st.tuples(st.just("op"), st.sampled_from(STREAMS), st.sampled_from(CELLS), st.booleans()),
    st.tuples(st.just("record"), st.sampled_from("ef"), st.sampled_from(STREAMS)),
    st.tuples(st.just("wait"), st.sampled_from(STREAMS), st.sampled_from("ef")),
    st.tuples(st.just("wait_stream"), st.sampled_from(STREAMS), st.sampled_from(STREAMS)),
    st.tuples(st.just("synchronize"), st.sampled_from(STREAMS)),
)


def has_race(entries):
    """By reachability over all pairs, without clocks or forgetting."""
    edges, tail, events, host, accesses = [], {}, {}, [], []

    def add(stream, *others):
        edges.append({node for node in (tail.get(stream), *host, *others) if node is not None})
        tail[stream] = len(edges) - 1
        return len(edges) - 1

    for kind, *rest in entries:
        if kind == "op":
            stream, (start, size), is_write = rest
            accesses.append((add(stream), range(start, start + size), is_write, stream))
        elif kind == "record":
            events[rest[0]] = add(rest[1])
        elif kind == "wait":
            add(rest[0], events.get(rest[1]))
        elif kind == "wait_stream":
            add(rest[0], add(rest[1]))
        else:
            host.append(add(rest[0]))
    before = []
    for predecessors in edges:
        before.append(set().union(predecessors, *(before[u] for u in predecessors)))
    return any(
        u not in before[v] and set(a) & set(b) and (wrote_a or wrote_b)
        for v, b, wrote_b, _ in accesses
        for u, a, wrote_a, _ in accesses
        if u < v
    )


@pytest.mark.heavy
@given(st.lists(OPERATIONS, max_size=24))
def test_a_hazard_is_found_exactly_where_some_pair_of_accesses_is_unordered(entries):
    log = [
        op(entry[1], number, *([[], [entry[2]]] if entry[3] else [[entry[2]], []]))
        if entry[0] == "op"
        else list(entry)
        for number, entry in enumerate(entries)
    ]
    assert bool(found(log)) == has_race(entries)


def steps_of_training(check, num_steps, per_step=2000, num_streams=4):
    """Layers with their own memory, a collective in 20 kernels, everything freed at the end of the step."""
    for step in range(num_steps):
        check.begin_step(step)
        base = (step % 3) * 10**8
        for i in range(per_step):
            address = base + i // 2 * 512
            if i % 2 == 0:
                check.allocate(address, 512, COMPUTE)
            check.launch(COMPUTE, [(address, 512)], [(address, 512)], i % 97)
            if i % 20 == 0:
                stream = ("comm", i % num_streams)
                check.record((step, i), COMPUTE)
                check.wait(stream, (step, i))
                check.launch(stream, [(address, 512)], (), i)
                check.record((step, -i), stream)
                check.wait(COMPUTE, (step, -i))
        for i in range(0, per_step, 2):
            check.free(base + i // 2 * 512)


@pytest.mark.heavy
def test_memory_stays_the_same_however_long_the_log(monkeypatch):
    for name in ("MAX_EVENTS", "MAX_FREED"):
        monkeypatch.setattr(check_module, name, 1000)
    check, sizes = HazardCheck(), []
    steps_of_training(check, 2)
    tracemalloc.start()
    try:
        for _ in range(3):
            steps_of_training(check, 2)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert all(later < earlier + 200_000 for earlier, later in pairwise(sizes))
    assert check.hazards == {}


def test_streams_may_come_in_any_order():
    for names in permutations(("x", "y", "z")):
        log = [op(names[0], "w", writes=[A]), waits(names[1], names[0]), waits(names[2], names[1])]
        assert found([*log, op(names[2], "r", [A])]) == []

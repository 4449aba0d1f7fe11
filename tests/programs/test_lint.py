"""Lint against a machine of streams that is run in the worst legal order, and against counts by hand."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given

from aorta.programs.language.emit import OPS, ORDERS, Shape, emit
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.graph import Graph, graph_of
from aorta.programs.language.ir import Program, Ref
from aorta.programs.language.text import format_program, parse_program
from aorta.programs.lint.one_rank import lint
from tests.programs.named import emit_named
from tests.programs.random_programs import MAIN_FILLS, programs, shapes
from tests.programs.streams import Streams


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tiles", [1, 2, 5, 8])
@pytest.mark.parametrize("num_streams", [2, 3, 4, 8])
def test_fork_and_join_in_the_loop_serialise_every_tile_and_either_hoist_frees_them(
    op, num_tiles, num_streams
):
    for order in ORDERS:
        verdict = lint(emit_named(order, op=op, num_tiles=num_tiles, num_streams=num_streams))
        assert verdict.is_safe
        assert len(verdict.false_edges) == (num_tiles - 1 if order == "factorized" else 0)


def test_order_within_one_stream_is_nobodys_mistake():
    assert lint(emit_named("factorized", num_streams=1)).false_edges == []


def test_the_chain_goes_from_the_gemm_over_main_to_the_next_all_gather():
    first = lint(emit_named("factorized", num_tiles=2, num_streams=2)).false_edges[0]
    assert [
        (link.stream, link.text.partition("(")[0].partition(" = ")[2] or link.text.partition("(")[0])
        for link in first.chain
    ] == [
        ("worker[0]", "gemm"),
        ("worker[0]", "record"),
        ("main", "wait"),
        ("main", "record"),
        ("worker[1]", "wait"),
        ("comm", "all_gather"),
    ]
    assert [link.line for link in first.chain] == [13, 15, 16, 9, 10, 11]
    assert first.ranks == [0, 1]


def test_a_missing_fork_is_a_race_with_the_caller():
    verdict = lint(emit(Shape(fork="none")))
    assert not verdict.is_safe
    assert [edge.before for edge in verdict.missing_edges] == ["the caller's work before"]
    assert verdict.missing_edges[0].after.startswith("gathered[0] = all_gather(A[0]")


@pytest.mark.parametrize("num_staging", [1, 2, 3, 4])
def test_staging_buffers_fewer_than_streams_are_overwritten_while_they_are_sent(num_staging):
    verdict = lint(emit(Shape(op="gemm_rs", num_tiles=8, num_streams=4, num_staging=num_staging)))
    # Tile i+k overwrites what tile i sends; with k = 4 both are on the same worker, which waits.
    expected = [(i, i + num_staging) for i in range(8 - num_staging)] if num_staging < 4 else []
    assert [_tiles(edge) for edge in verdict.missing_edges] == expected


def _tiles(edge):
    return int(edge.before.split("[")[1].split("]")[0]), int(edge.after.split("A[")[1].split("]")[0])


def test_without_the_wait_for_the_communication_the_gemm_reads_too_early():
    text = format_program(emit(Shape(num_tiles=2))).replace("    wait_work(gathered[i])\n", "")
    missing = lint(parse_program(text)).missing_edges
    assert {(edge.before.split("(")[0], edge.after.split("(")[0]) for edge in missing} == {
        ("gathered[0] = all_gather", "gemm"),
        ("gathered[1] = all_gather", "gemm"),
    }


def test_without_the_join_the_caller_reads_too_early():
    text = format_program(emit(Shape(num_tiles=2, num_streams=2)))
    text = text.replace("    joined[i] = record(worker[i % 2])\n    wait(joined[i])\n", "")
    assert {edge.after for edge in lint(parse_program(text)).missing_edges} == {"the caller's work after"}


def test_an_event_that_is_recorded_before_the_work_does_not_cover_it():
    text = """program("early", ranks=1)
main = current_stream()
A = input()
B = output()
early = record(main)
user("produce", reads=[A], writes=[B])
set_stream(side)
wait(early)
user("change", reads=[B], writes=[B])
set_stream(main)
late = record(side)
wait(late)
"""
    edge = lint(parse_program(text)).missing_edges[0]
    assert edge.before.startswith('user("produce"')
    assert edge.after.startswith('user("change"')
    later = text.replace("early = record(main)\n", "")
    later = later.replace("set_stream(side)\n", "early = record(main)\nset_stream(side)\n", 1)
    assert lint(parse_program(later)).is_safe


def test_an_event_means_what_was_recorded_last_before_the_wait():
    text = """program("twice", ranks=1)
main = current_stream()
A = input()
B = output()
e = record(main)
user("produce", reads=[A], writes=[B])
e = record(main)
set_stream(side)
wait(e)
user("change", reads=[B], writes=[B])
e = record(side)
set_stream(main)
wait(e)
"""
    assert lint(parse_program(text)).is_safe


def test_a_wait_for_data_from_another_stream_is_no_false_edge():
    verdict = lint(parse_program(MAIN_FILLS))
    assert (verdict.missing_edges, verdict.false_edges) == ([], [])


def test_the_callers_own_work_is_never_an_end_of_a_false_edge():
    text = """program("scratch", ranks=1)
main = current_stream()
S = allocate()
forked = record(main)
set_stream(side)
wait(forked)
user("scratch only", writes=[S])
joined = record(side)
set_stream(main)
wait(joined)
"""
    assert lint(parse_program(text)).false_edges == []


def test_reading_what_nothing_wrote_and_waiting_for_nothing_are_told():
    text = """program("x", ranks=1)
A = allocate()
B = output()
wait(never)
user("use", reads=[A], writes=[B])
"""
    verdict = lint(parse_program(text))
    assert [edge.before for edge in verdict.missing_edges] == ["nothing"]
    assert verdict.warnings == ["line 4: wait(never) waits for nothing: never was not recorded before"]


def test_an_output_tile_that_nothing_fills_is_told():
    text = format_program(emit(Shape(num_tiles=3))).replace("C = output(3)", "C = output(4)")
    reasons = [edge.reason for edge in lint(parse_program(text)).missing_edges]
    assert reasons == ["reads C[3], which nothing wrote before"]


def test_a_wait_for_an_unknown_communication_is_an_error():
    text = format_program(emit(Shape())).replace("wait_work(gathered[i])", "wait_work(gathered[i + 1])")
    with pytest.raises(HostProgramError, match=r"^line 14: wait_work\(gathered\[1\]\): no communication"):
        lint(parse_program(text))


@pytest.mark.heavy
@given(shapes())
def test_emitted_programs_are_safe(shape):
    verdict = lint(emit(shape))
    assert (verdict.missing_edges, verdict.rank_mismatches, verdict.warnings) == ([], [], [])


def required_pairs(graph: Graph) -> Iterator[tuple[int, int, Ref]]:
    """Operations that must keep the order in which the host issues them, as (earlier, later, part)."""
    accesses: dict[str, list[tuple[int, Ref, bool]]] = {}
    for v in graph.data():
        node = graph.nodes[v]
        for is_write, parts in ((False, node.reads), (True, node.writes)):
            for part in parts:
                for u, earlier_part, other_writes in accesses.get(part.name, ()):
                    if (is_write or other_writes) and part.overlaps(earlier_part):
                        yield u, v, part
        for is_write, parts in ((False, node.reads), (True, node.writes)):
            for part in parts:
                accesses.setdefault(part.name, []).append((v, part, is_write))


def check_against_the_machine(program: Program, rank: int = 0) -> None:
    """Happens-before, races and false edges, each by running the machine in its worst order."""
    graph, machine = graph_of(program, rank), Streams.of(program, rank)
    data, ordered = graph.data(), graph.precedence()
    for b in range(len(data)):
        for a in range(b):
            before = ordered.is_before(data[a], data[b])
            assert before == (not machine.can_run_before(late=a, early=b))
    number = {node: at for at, node in enumerate(data)}
    racing = any(machine.can_run_before(late=number[u], early=number[v]) for u, v, _ in required_pairs(graph))
    assert racing == bool(
        [e for e in lint(program).missing_edges if e.before != "nothing" and rank in e.ranks]
    )


@pytest.mark.heavy
@given(programs())
def test_happens_before_of_random_programs_is_what_the_machine_cannot_reorder(program):
    check_against_the_machine(program)


@pytest.mark.heavy
@given(shapes(planted=True))
def test_happens_before_of_emitted_programs_is_what_the_machine_cannot_reorder(shape):
    check_against_the_machine(emit(shape), rank=shape.num_ranks - 1)


@pytest.mark.heavy
@given(programs(max_size=16))
def test_false_edges_are_what_is_ordered_by_more_than_data_streams_and_lanes(program):
    graph, machine, needed = graph_of(program), Streams.of(program), Streams.of(program, events=False)
    number = {node: at for at, node in enumerate(graph.data())}
    for u, v, _ in required_pairs(graph):
        if not machine.can_run_before(late=number[u], early=number[v]):
            needed.needs.setdefault(number[v], set()).add(number[u])
    inner = range(1, len(machine.operations) - 1)
    excess = [
        (a, b)
        for b in inner
        for a in range(1, b)
        if not machine.can_run_before(late=a, early=b) and needed.can_run_before(late=a, early=b)
    ]
    assert bool(excess) == bool(lint(program).false_edges)


@pytest.mark.heavy
@given(programs())
def test_a_program_without_races_gives_one_result_in_every_order(program):
    if not lint(program).is_safe:
        return
    machine = Streams.of(program)
    in_order = results(machine, range(len(machine.operations)))
    for seed in range(3):
        choose = random.Random(seed)
        ran = machine.run(lambda ready, choose=choose: choose.randrange(len(ready)))
        assert results(machine, ran) == in_order


def results(machine: Streams, order) -> list[object]:
    """What each operation reads, as a history of who wrote: equal only if the data flowed the same way."""
    memory: dict[tuple[str, int], object] = {}
    read: dict[int, object] = {}
    for number in order:
        op = machine.operations[number]
        if not isinstance(op, str):
            read[number] = [memory.get(cell) for part in op.reads for cell in cells(part)]
            for part in op.writes:
                for cell in cells(part):
                    memory[cell] = number
    return [*sorted(read.items()), *sorted(memory.items())]


def cells(part):
    sizes = {"X": 2, "Y": 1, "Z": 1}
    return [(part.name, i) for i in (part.index or range(sizes[part.name]))]

"""What is said of memory that ran out, of made shortages and lines."""

import pytest

from aorta.account.load.shortage import shortage_lines
from aorta.records.memory import HeldMemory, MemoryShortage, read_shortages, write_shortage
from aorta.records.schema import MemoryRecord
from tests.records.run_folders import step_record, step_timeline

GIB = 1 << 30


def shortage(*held, why="out of memory", **fields):
    usual = dict(
        device="cuda:0", limit_bytes=10 * GIB, allocated_bytes=9 * GIB, asked_bytes=GIB, unused_bytes=0
    )
    return MemoryShortage(why=why, held=list(held), **(usual | fields))


def row(kind, gib, module="", holder="", num_blocks=1):
    return HeldMemory(kind=kind, bytes=int(gib * GIB), module=module, holder=holder, num_blocks=num_blocks)


def records(ends, tops=None):
    return [
        step_record(
            step_timeline(step=step),
            memory=MemoryRecord(
                allocated_bytes=int(end * GIB),
                reserved_bytes=10 * GIB,
                peak_allocated_bytes=10 * GIB,
                forward_bytes=int((tops or ends)[step] * GIB),
            ),
        )
        for step, end in enumerate(ends)
    ]


def said(found, lines_of=lambda rank: (), ranks=(0,)):
    return shortage_lines(found, lines_of, ranks)


def test_a_run_that_had_enough_says_nothing():
    assert said({}) == []


def test_the_rank_step_phase_line_and_module_come_first():
    one = shortage(
        row("activations", 8, "blocks.*.mlp"),
        global_step=7, phase="backward", place="train(), t.py:9", module="blocks.3.mlp",
    )  # fmt: skip
    assert said({1: one})[0] == (
        "out of memory on rank 1 in step 7, in the backward pass, at train(), t.py:9, module blocks.3.mlp:"
        " 1.0 GiB asked for, 9.0 GiB of 10.0 GiB allocated on cuda:0"
    )


def test_what_is_held_is_told_with_shares_and_what_nobody_found():
    one = shortage(row("kept graphs", 6, "a", "losses (t.py:3)"), row("parameters", 1, "a"))
    assert said({0: one})[1:] == [
        "held: 6.0 GiB (67 %) graphs of earlier results in losses (t.py:3), of a; 1.0 GiB (11 %) parameters"
        " of a; 2.0 GiB of work under way and of C++ alone",
        "change: keep loss.detach() or loss.item() instead of the loss, and detach what goes on to the next"
        " step: losses (t.py:3) has graphs",
    ]


def test_memory_in_pieces_is_told_where_what_was_asked_for_is_there_but_in_pieces():
    lines = said({0: shortage(row("parameters", 4), unused_bytes=3 * GIB)})
    assert "besides 3.0 GiB reserved in pieces that are too small" in lines[1]
    assert "expandable_segments:True" in lines[-1]
    expandable = said({0: shortage(row("parameters", 4), unused_bytes=3 * GIB, expands_segments=True)})
    assert "expandable_segments" not in expandable[-1]
    assert "pieces" not in said({0: shortage(row("parameters", 4), unused_bytes=GIB // 2)})[1]


def test_memory_in_pieces_is_not_to_blame_where_what_is_held_is_more_and_grows():
    """With the pieces in one, the next batches would not fit either."""
    one = shortage(row("activations", 6, "head"), unused_bytes=2 * GIB)
    growing = said({0: one}, lambda rank: records([1] * 6, [1, 1, 1, 2, 4, 7]))
    assert "besides 2.0 GiB reserved in pieces" in growing[1]
    assert growing[-1].startswith("change: find out why batches of later steps are larger")
    steady = said({0: one}, lambda rank: records([1] * 6, [9] * 6))
    assert "expandable_segments:True" in steady[-1]
    mostly = shortage(row("kept tensors", 2, holder="cached (t.py:3)"), unused_bytes=6 * GIB)
    assert "expandable_segments:True" in said({0: mostly}, lambda rank: records([1, 1, 1, 2, 3, 4]))[-1]


def test_a_rank_that_keeps_more_is_told_to_let_go_and_not_to_share_its_work():
    def lines_of(rank):
        return records([1] * 6, [8 if rank == 1 else 3] * 6)

    one = shortage(row("kept tensors", 6, holder="snapshots (t.py:3)", num_blocks=9))
    lines = said({1: one}, lines_of, ranks=(0, 1))
    assert "differs: rank 1 had 8.0 GiB in step 5, rank 0, which has the most of the others, 3.0 GiB" in lines
    assert lines[-1].startswith("change: let go of what snapshots (t.py:3) keeps")
    assert "(.detach().cpu())" in lines[-1]
    on_host = shortage(row("kept tensors", 6, holder="snapshots (t.py:3)", num_blocks=9), device="cpu")
    assert "keep numbers of it" in shortage_lines({0: on_host}, lambda rank: (), [0])[-1]


def test_growth_is_that_of_what_stays_or_else_of_the_pass():
    stays = said({0: shortage(row("parameters", 4))}, lambda rank: records([1, 1, 1, 2, 3, 4, 5]))
    assert "grew: what is left at the end of a step by 1.0 GiB a step, from 2.0 GiB in step 3" in stays[2]
    passing = said(
        {0: shortage(row("activations", 4, "head"))}, lambda rank: records([1] * 6, [1, 1, 1, 2, 4, 8])
    )
    assert "grew: the forward pass by 3.0 GiB a step" in passing[2]
    assert passing[-1].startswith("change: find out why batches of later steps are larger")
    assert not any("grew" in line for line in said({0: shortage()}, lambda rank: records([3] * 6, [9] * 6)))
    # Steps that were not recorded may have grown: the one that died tells.
    later = said({0: shortage(row("activations", 6, "head"))}, lambda rank: records([1] * 6, [2] * 6))
    assert (
        later[2]
        == "grew: 9.0 GiB were in use, and 2.0 GiB at most in steps 3 to 5, of those that were recorded"
    )
    assert later[-1].startswith("change: find out why batches of later steps are larger")


def test_a_rank_that_has_much_more_than_the_others_is_told():
    def lines_of(rank):
        return records([1] * 6, [8 if rank == 1 else 3 + rank] * 6)

    lines = said({1: shortage(row("activations", 6, "head"))}, lines_of, ranks=(0, 1, 2, 3))
    assert "differs: rank 1 had 8.0 GiB in step 5, rank 3, which has the most of the others, 6.0 GiB" in lines
    assert lines[-1].startswith("change: give ranks equal work: rank 1")


def test_one_result_that_is_larger_than_all_that_is_held_is_what_has_to_shrink():
    one = shortage(row("parameters", 1), asked_bytes=4 * GIB, allocated_bytes=2 * GIB, module="attention")
    assert said({0: one})[-1] == "change: a smaller micro batch, or torch.utils.checkpoint around attention"


@pytest.mark.parametrize("data", [b"", b"{", b'{"why": 1}', b"\xff"])
def test_a_file_that_cannot_be_read_is_none(tmp_path, data):
    write_shortage(tmp_path, 0, shortage(row("parameters", 1)))
    assert read_shortages(tmp_path, [0, 1])[0].held[0].bytes == GIB
    (tmp_path / "rank_0_memory.json").write_bytes(data)
    assert read_shortages(tmp_path, [0, 1]) == {}


def test_a_file_that_was_changed_is_left_out_and_said(tmp_path):
    write_shortage(tmp_path, 0, shortage(row("parameters", 1)))
    path, notes = tmp_path / "rank_0_memory.json", []
    path.write_bytes(path.read_bytes().replace(b"parameters", b"gradients"))
    assert read_shortages(tmp_path, [0], notes) == {}
    assert notes == [f"{path} is left out: it was changed after it was written"]

"""Who is named, from reports written by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import aorta
from aorta.cli import main
from aorta.errors import RecordError
from aorta.hang.find import find, sentence
from aorta.hang.report import CallState, GroupState, HangReport, read_reports
from tests.hang.reports_by_hand import report
from tests.unprivileged import mode, python_without_rights

SIZES = {"all_reduce": 64, "all_gather": 32}


def call(seq: int, op: str, step: int, state: str) -> CallState:
    """state: done, waits (started, not finished) or queued (behind another on its stream)."""
    return CallState(
        seq=seq,
        op=op,
        bytes=SIZES[op],
        dtype="float32",
        step=step,
        started=state != "queued",
        finished=state == "done",
        age_s=1.0,
    )


def group(*calls: CallState, key: str = "0", ranks: tuple[int, ...] = (0, 1), seen: int = 0) -> GroupState:
    """seen: collectives issued so far, where the calls do not tell."""
    return GroupState(
        key=key,
        name={"0": "default"}.get(key, key),
        ranks=list(ranks),
        backend="gloo",
        num_seen=calls[-1].seq + 1 if calls else seen,
        calls=list(calls),
    )


def done(step: int, first: int) -> list[CallState]:
    """A whole step: all-reduce, all-gather."""
    return [call(first, "all_reduce", step, "done"), call(first + 1, "all_gather", step, "done")]


def test_a_rank_that_has_not_come_is_named_with_the_collective() -> None:
    waits = group(*done(4, 8), call(10, "all_reduce", 5, "waits"))
    found = find([report(0, waits), report(1, group(*done(4, 8)))])
    assert (found.kind, found.ranks) == ("absent", [1])
    assert sentence(found) == (
        "rank 1 has not come to all_reduce of 64 bytes float32 (#10 of group default, step 5); "
        "rank 0 waiting there"
    )


def test_a_rank_that_never_used_the_group_is_absent() -> None:
    found = find([report(0, group(call(0, "all_reduce", 0, "waits"))), report(1)])
    assert (found.kind, found.ranks) == ("absent", [1])


def test_a_rank_without_a_report_is_the_one_that_is_waited_for() -> None:
    three = (0, 1, 2)
    groups = group(call(3, "all_gather", 1, "waits"), ranks=three)
    found = find([report(0, groups, world_size=3), report(2, groups, world_size=3)])
    assert (found.kind, found.ranks, found.silent) == ("absent", [1], [1])
    assert "no report from rank 1" in sentence(found)


def test_the_rank_that_skipped_is_told_by_the_step_before() -> None:
    """Rank 1 went on to the all-gather; with two ranks there is no majority."""
    kept = group(*done(4, 8), call(10, "all_reduce", 5, "waits"))
    skipped = group(*done(4, 8), call(10, "all_gather", 5, "waits"))
    found = find([report(0, kept), report(1, skipped)])
    assert (found.kind, found.ranks) == ("mismatch", [1])
    assert "rank 1 skipped all_reduce of 64 bytes float32" in sentence(found)
    assert "others issued all_reduce of 64 bytes float32 (#10 of group default, step 5)" in sentence(found)


def test_a_skip_is_told_by_later_steps_of_hosts_that_ran_ahead() -> None:
    """On a GPU the hosts go on: what is not finished is all that a report may hold, and very much of it."""

    def ahead(skipped: bool) -> list[CallState]:
        issued = [(step, op) for step in range(6, 600) for op in ("all_reduce", "all_gather")][skipped:]
        states = ["waits"] + ["queued"] * (len(issued) - 1)
        return [
            call(12 + index, op, step, state)
            for index, ((step, op), state) in enumerate(zip(issued, states, strict=True))
        ]

    found = find([report(0, group(*ahead(False))), report(1, group(*ahead(True)))])
    assert (found.kind, found.ranks) == ("mismatch", [1])
    assert "rank 1 skipped all_reduce of 64 bytes" in sentence(found)


def test_what_followed_a_skip_is_a_consequence() -> None:
    """On a device the odd pair of collectives may even end; the host of rank 1 is a step further."""
    gone = [call(12, "all_reduce", 6, "queued"), call(13, "all_gather", 6, "queued")]
    kept = group(call(10, "all_reduce", 5, "waits"), call(11, "all_gather", 5, "queued"), *gone)
    went_on = [call(11, "all_reduce", 6, "waits"), call(12, "all_gather", 6, "queued")]
    skipped = group(call(10, "all_gather", 5, "done"), *went_on, call(13, "all_reduce", 7, "queued"))
    found = find([report(0, kept), report(1, skipped)])
    assert (found.kind, found.ranks) == ("mismatch", [1])
    assert "rank 1 skipped all_reduce of 64 bytes float32, which step 6 had in this place" in sentence(found)


def test_sizes_of_an_uneven_exchange_may_differ() -> None:
    def uneven(rank: int, num_bytes: int, state: str) -> HangReport:
        one = msgspec.structs.replace(call(0, "all_gather", 0, state), op="all_to_all", bytes=num_bytes)
        return report(rank, group(one))

    assert find([uneven(0, 8, "waits"), uneven(1, 24, "waits")]).kind == "all_inside"


def test_a_receive_waits_for_its_peer() -> None:
    """Of a pipeline: 2 receives from 1, which receives from 0, which sleeps. Their numbers differ."""
    ranks = (4, 5, 6)

    def receives(seq: int, peer: int) -> GroupState:
        one = msgspec.structs.replace(call(seq, "all_gather", 0, "waits"), op="recv", peer=peer)
        return group(one, key="pp", ranks=ranks)

    idle = group(key="pp", ranks=ranks, seen=9)
    others = [report(rank, world_size=7) for rank in range(4)]
    found = find(
        [
            *others,
            report(4, idle, world_size=7),
            report(5, receives(3, 0), world_size=7),
            report(6, receives(8, 1), world_size=7),
        ]
    )
    assert (found.kind, found.ranks) == ("absent", [4])


def test_without_a_step_before_the_majority_is_right() -> None:
    ranks = (0, 1, 2)
    usual = group(call(0, "all_reduce", 0, "waits"), ranks=ranks)
    other = group(call(0, "all_gather", 0, "waits"), ranks=ranks)
    found = find([report(r, other if r == 2 else usual, world_size=3) for r in ranks])
    assert (found.kind, found.ranks) == ("mismatch", [2])


def steps_of(num_steps: int, every: int, extra: str = "all_gather") -> list[CallState]:
    """An all-reduce in each step, and in one of `every` steps another collective before it."""
    ops = [(s, op) for s in range(num_steps) for op in ([extra] * (s % every == 0) + ["all_reduce"])]
    return [call(seq, op, step, "done") for seq, (step, op) in enumerate(ops)]


@pytest.mark.parametrize("late", range(4))
def test_one_of_four_that_issues_another_collective_in_an_unusual_step_is_named(late: int) -> None:
    """Step 10 is one of five with an all-gather: no step near it is like it."""
    ranks = tuple(range(4))
    before = steps_of(10, 5)
    num = len(before)
    usual = group(*before, call(num, "all_gather", 10, "waits"), ranks=ranks)
    other = msgspec.structs.replace(call(num, "all_reduce", 10, "waits"), op="broadcast")
    odd = group(*before, other, ranks=ranks)
    found = find([report(r, odd if r == late else usual, world_size=4) for r in ranks])
    assert (found.kind, found.ranks) == ("mismatch", [late])
    assert sentence(found).startswith(
        f"rank {late} issued broadcast of 64 bytes float32 where others issued all_"
    )


@pytest.mark.parametrize("late", range(3))
def test_one_of_three_that_skips_what_is_done_every_few_steps_is_named(late: int) -> None:
    ranks = (0, 1, 2)
    before = steps_of(10, 5)
    num = len(before)
    usual = group(
        *before, call(num, "all_gather", 10, "waits"), call(num + 1, "all_reduce", 10, "queued"), ranks=ranks
    )
    odd = group(*before, call(num, "all_reduce", 10, "waits"), ranks=ranks)
    found = find([report(r, odd if r == late else usual, world_size=3) for r in ranks])
    assert (found.kind, found.ranks) == ("mismatch", [late])
    assert f"rank {late} skipped all_gather of 32 bytes" in sentence(found)


@pytest.mark.parametrize("late", range(2))
def test_of_two_ranks_the_one_that_skips_what_every_fifth_step_has_is_named(late: int) -> None:
    before = steps_of(15, 5)
    num = len(before)
    usual = group(*before, call(num, "all_gather", 15, "waits"))
    odd = group(*before, call(num, "all_reduce", 15, "waits"))
    found = find([report(r, odd if r == late else usual) for r in (0, 1)])
    assert (found.kind, found.ranks) == ("mismatch", [late])


@pytest.mark.parametrize("late", range(2))
def test_of_two_ranks_the_one_that_issues_one_more_is_named(late: int) -> None:
    before = steps_of(16, 5)
    num = len(before)
    usual = group(*before, call(num, "all_reduce", 16, "waits"))
    odd = group(*before, call(num, "all_gather", 16, "waits"))
    found = find([report(r, odd if r == late else usual) for r in (0, 1)])
    assert (found.kind, found.ranks) == ("mismatch", [late])


def test_one_of_three_with_another_size_is_named_and_who_has_not_come_is_said() -> None:
    ranks = tuple(range(4))
    usual = group(*done(4, 8), call(10, "all_reduce", 5, "waits"), ranks=ranks)
    odd = group(
        *done(4, 8), msgspec.structs.replace(call(10, "all_reduce", 5, "waits"), bytes=40), ranks=ranks
    )
    away = group(*done(4, 8), ranks=ranks)
    rows = {0: usual, 1: odd, 2: usual, 3: away}
    found = find([report(r, one, world_size=4) for r, one in rows.items()])
    assert (found.kind, found.ranks) == ("mismatch", [1])
    assert sentence(found).startswith(
        "rank 1 issued all_reduce of 40 bytes float32 where others issued all_reduce of 64 bytes float32"
    )
    assert "rank 3 has not come there" in sentence(found)


def test_of_two_groups_the_first_divergence_counts() -> None:
    """Rank 1 issued another collective in group b, two steps before ranks differ in group a."""

    def rank(number: int, op_a: str, op_b: str) -> HangReport:
        a = group(call(0, "all_reduce", 4, "done"), call(1, op_a, 6, "waits"), key="a", ranks=(0, 1, 2))
        b = group(call(0, op_b, 4, "waits"), key="b", ranks=(0, 1, 2))
        return report(number, a, b, world_size=3)

    found = find(
        [
            rank(0, "all_reduce", "all_reduce"),
            rank(1, "all_reduce", "all_gather"),
            rank(2, "all_gather", "all_reduce"),
        ]
    )
    assert (found.kind, found.ranks) == ("mismatch", [1])


def test_two_ranks_that_differ_from_the_start_are_not_guessed() -> None:
    found = find(
        [
            report(0, group(call(0, "all_reduce", 0, "waits"))),
            report(1, group(call(0, "all_gather", 0, "waits"))),
        ]
    )
    assert (found.kind, found.ranks) == ("mismatch", [])
    assert "no other step tells" in sentence(found)


def test_equal_collectives_that_shifted_are_seen_by_their_steps() -> None:
    """Every step has one all-reduce. Rank 1 left out that of step 3 and is one short at the end."""
    calls = [call(seq, "all_reduce", seq, "done") for seq in range(6)]
    shifted = [call(seq, "all_reduce", seq if seq < 3 else seq + 1, "done") for seq in range(5)]
    waits = call(5, "all_reduce", 5, "waits")
    found = find([report(0, group(*calls[:5], waits)), report(1, group(*shifted))])
    assert (found.kind, found.ranks) == ("absent", [1])
    assert "rank 1 issued #3 of group default in step 4, others in step 3" in sentence(found)


def test_the_end_of_a_chain_is_named() -> None:
    """0 waits for 1 in tp; 1 waits for 3 in dp; 3 sleeps. On 1 the tp collective is queued behind."""
    tp0 = group(call(7, "all_reduce", 2, "waits"), key="tp", ranks=(0, 1))
    tp1 = group(call(7, "all_reduce", 2, "queued"), key="tp", ranks=(0, 1))
    dp = group(call(2, "all_gather", 2, "waits"), key="dp", ranks=(1, 3))
    late = group(key="dp", ranks=(1, 3), seen=2)
    found = find(
        [
            report(0, tp0, world_size=4),
            report(1, tp1, dp, world_size=4),
            report(2, world_size=4),
            report(3, late, world_size=4),
        ]
    )
    assert (found.kind, found.ranks) == ("absent", [3])
    assert found.stuck is not None
    assert (found.stuck.name, found.stuck.seq) == ("dp", 2)


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    def rank(number: int, first: str, second: str) -> HangReport:
        return report(
            number,
            group(call(0, "all_reduce", 0, "waits"), key=first),
            group(call(0, "all_reduce", 0, "queued"), key=second),
        )

    found = find([rank(0, "a", "b"), rank(1, "b", "a")])
    assert found.kind == "cycle"
    assert "rank 0 waits in all_reduce of 64 bytes float32 (#0 of group a) for rank 1" in sentence(found)


def test_all_inside_the_same_collective_blames_no_rank() -> None:
    waits = group(call(0, "all_reduce", 0, "waits"))
    found = find([report(0, waits), report(1, waits)])
    assert (found.kind, found.ranks) == ("all_inside", [])
    assert sentence(found) == (
        "ranks 0, 1 are all in all_reduce of 64 bytes float32 (#0 of group default, step 0): "
        "none is missing, look at devices and links"
    )


def test_one_rank_in_a_collective_that_the_other_has_finished_is_said_of_one() -> None:
    found = find(
        [
            report(0, group(call(0, "all_reduce", 0, "waits"))),
            report(1, group(call(0, "all_reduce", 0, "done"))),
        ]
    )
    assert (found.kind, found.ranks) == ("all_inside", [])
    assert sentence(found).startswith("rank 0 is in all_reduce of 64 bytes float32 (#0 of group default, ")


def test_without_collectives_the_rank_behind_is_named() -> None:
    found = find([report(0, num_steps=6), report(1, num_steps=5)])
    assert (found.kind, found.ranks) == ("nobody_waits", [1])
    assert sentence(found) == "no rank waits in a collective that was recorded; rank 1 is behind"


def test_without_collectives_several_ranks_behind_are_named() -> None:
    found = find([report(rank, num_steps=5 + (rank == 0), world_size=3) for rank in range(3)])
    assert (found.kind, found.ranks) == ("nobody_waits", [1, 2])
    assert sentence(found) == "no rank waits in a collective that was recorded; ranks 1, 2 are behind"


def test_of_several_silent_ranks_the_note_on_a_kill_is_said_of_several() -> None:
    ranks = (0, 1, 2)
    waits = report(0, group(call(3, "all_gather", 1, "waits"), ranks=ranks), world_size=3)
    counted = [report(rank, group(ranks=ranks, seen=3), world_size=3) for rank in (1, 2)]
    found = find([waits, *(msgspec.structs.replace(one, is_from_last_calls=True) for one in counted)])
    assert (found.kind, found.ranks, found.silent) == ("absent", [1, 2], [1, 2])
    assert sentence(found) == (
        "ranks 1, 2 have not come to all_gather of 32 bytes float32 (#3 of group default, step 1); "
        "rank 0 waiting there; if ranks 1, 2 were killed, what they had queued before may not have run "
        "either; no report from ranks 1, 2"
    )


def test_ranks_that_came_in_different_steps_with_nothing_to_tell_are_not_guessed() -> None:
    ranks = (0, 1)
    found = find(
        [
            report(rank, group(call(0, "all_reduce", rank, "done"), call(1, op, 2, "waits"), ranks=ranks))
            for rank, op in ((0, "all_reduce"), (1, "all_gather"))
        ]
    )
    assert (found.kind, found.ranks) == ("mismatch", [])
    assert sentence(found) == (
        "the ranks came to all_reduce of 64 bytes float32 (#0 of group default, step 0) in different steps, "
        "and nothing tells which left one out"
    )


def status_of_hang(folder: Path, *options: str) -> int | str | None:
    with pytest.raises(SystemExit) as ending:
        main(["hang", str(folder), *options])
    return ending.value.code


def test_the_command_names_rank_and_collective_first(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "hang"
    folder.mkdir()
    waits = group(*done(4, 8), call(10, "all_reduce", 5, "waits"))
    for one in (report(0, waits), report(1, group(*done(4, 8)))):
        (folder / f"rank{one.rank}.json").write_bytes(msgspec.json.encode(one))
    assert status_of_hang(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 1 has not come to all_reduce")
    assert lines[3].split()[:2] == ["1", "5"]
    assert "step (train.py:11)" in lines[3]
    assert "all_reduce #10 of default" in lines[4]
    assert status_of_hang(tmp_path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ranks"] == [1]
    assert document["sentence"] == lines[0]
    assert [report["rank"] for report in document["reports"]] == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        pytest.param(None, b"", "reported a hang; aorta run --hang turns the watchdog on", id="none"),
        pytest.param("rank0.json", b"{}", "is no report of a hang", id="not-one"),
        pytest.param("rank0.json", b'{"schema": 1', "is no report of a hang", id="cut"),
    ],
)
def test_what_is_no_report_is_one_line(
    name: str | None, content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "hang").mkdir()
    if name is not None:
        (tmp_path / "hang" / name).write_bytes(content)
    with pytest.raises(RecordError, match=expected):
        read_reports(tmp_path)
    assert status_of_hang(tmp_path) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_watchdog_that_has_not_reported_yet_is_said_to_be_on(tmp_path: Path) -> None:
    with (
        aorta.instrument(tmp_path, hang={"timeout_s": 60}) as recorder,
        recorder.step(),
        pytest.raises(RecordError, match="the watchdog is on, and no rank stood still for as long"),
    ):
        read_reports(tmp_path)


def two_groups(rank: int, order: str, num_ranks: int = 3) -> HangReport:
    """Step 4 with an all-reduce in group a, then in b, and what order says: a and b wait in step 5; D is one
    in group a that is done, after which b waits in step 5 and a in step 6."""
    ranks = tuple(range(num_ranks))
    issued: dict[str, list[CallState]] = {"a": [], "b": []}
    meaning = {"a": ("a", 5, "waits"), "b": ("b", 5, "waits"), "D": ("a", 5, "done"), "A": ("a", 6, "waits")}
    rows = [("a", 4, "done"), ("b", 4, "done"), *[meaning["b" if c == "B" else c] for c in order]]
    for age, (name, step, state) in enumerate(rows):
        one = call(len(issued[name]), "all_reduce", step, state)
        issued[name].append(msgspec.structs.replace(one, age_s=9.0 - age))
    groups = [group(*calls, key=name, ranks=ranks) for name, calls in issued.items()]
    return report(rank, *groups, world_size=num_ranks)


@pytest.mark.parametrize("departs", [0, 1, 2])
def test_in_a_ring_the_rank_that_left_its_own_order_is_named(departs: int) -> None:
    """It went to b first, or skipped a: the others wait in a for it, it waits in b for them."""
    found = find([two_groups(rank, "b" if rank == departs else "a") for rank in range(3)])
    assert (found.kind, found.ranks) == ("cycle", [departs])
    assert found.stuck is not None
    assert found.stuck.name == "a"
    assert sentence(found).startswith(
        f"rank {departs} went on to all_reduce of 64 bytes float32 (group b) where step 4 had all_reduce "
        "of 64 bytes float32 (group a); the ranks wait for each other; "
    )


def test_in_a_ring_the_rank_that_left_a_step_too_early_is_named() -> None:
    """Rank 1 left out the last all-reduce of step 5 and waits in step 6, the others wait for it in step 5."""
    found = find([two_groups(0, "DB"), two_groups(1, "DA"), two_groups(2, "DB")])
    assert (found.kind, found.ranks) == ("cycle", [1])
    assert "rank 1 left step 5 without all_reduce of 64 bytes float32 (group b), which" in sentence(found)


def test_in_a_ring_without_other_steps_all_that_are_waited_for_are_named() -> None:
    def first_step(rank: int, name: str) -> HangReport:
        waits = group(call(0, "all_reduce", 0, "waits"), key=name, ranks=(0, 1, 2))
        return report(rank, waits, world_size=3)

    found = find([first_step(0, "b"), first_step(1, "a"), first_step(2, "a")])
    assert (found.kind, found.ranks) == ("cycle", [0, 1, 2])
    assert sentence(found).startswith("ranks wait for each other; rank 0 waits in")


def test_the_first_collective_that_a_rank_has_not_come_to_is_named() -> None:
    """The root of a broadcast waits for rank 2; rank 1 and 3 got their part and wait for it a step later."""
    ranks = (0, 1, 2, 3)
    past = group(*done(5, 8), ranks=ranks)
    root = group(*done(5, 8), call(10, "all_gather", 5, "waits"), ranks=ranks)
    next_step = group(call(3, "all_reduce", 6, "waits"), key="next", ranks=ranks)
    got = group(*done(5, 8), call(10, "all_gather", 5, "done"), ranks=ranks)
    none_yet = group(key="next", ranks=ranks, seen=3)
    groups = [(none_yet, root), (next_step, got), (none_yet, past), (next_step, got)]
    found = find([report(rank, *of, world_size=4) for rank, of in enumerate(groups)])
    assert (found.kind, found.ranks) == ("absent", [2])
    assert found.stuck is not None
    assert (found.stuck.name, found.stuck.seq) == ("default", 10)


def test_a_report_of_long_ago_is_said_to_be_old() -> None:
    late = group(*done(4, 8), call(10, "all_reduce", 5, "waits"))
    now = msgspec.structs.replace(report(0, late), written_unix_ns=200 * 10**9)
    before = msgspec.structs.replace(report(1, group(*done(4, 8))), written_unix_ns=100 * 10**9)
    assert sentence(find([now, before])).endswith("; what rank 1 reported is older by 100 s or more")
    assert not find([now, msgspec.structs.replace(before, written_unix_ns=170 * 10**9)]).notes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"world_size": 10**9}, "rank 0 of 1000000000", id="more-ranks-than-there-can-be"),
        pytest.param({"groups": [group(ranks=(0, 7))]}, "none of the run's 2", id="rank-outside-the-run"),
        pytest.param(
            {
                "groups": [
                    group(msgspec.structs.replace(call(0, "all_reduce", 0, "waits"), op="recv", peer=7))
                ]
            },
            "a peer that is not in the group",
            id="peer-outside-the-group",
        ),
    ],
)
def test_a_damaged_report_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(report(0), **change)))
    assert status_of_hang(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_run_that_finished_without_a_hang_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with aorta.instrument(tmp_path) as recorder, recorder.step():
        pass
    (tmp_path / "rank_0_sites.json").write_bytes(b"{}")
    assert status_of_hang(tmp_path) == 0
    assert capsys.readouterr().out == "the run finished; no rank has reported a hang\n"
    assert status_of_hang(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "ending": "finished", "sentence": "no rank has reported a hang", "ranks": [], "reports": []
    }  # fmt: skip


def test_two_reports_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("rank0.json", "rank1.json"):
        (tmp_path / name).write_bytes(msgspec.json.encode(report(0)))
    with pytest.raises(RecordError, match="two reports of rank 0"):
        read_reports(tmp_path)


def test_collectives_between_sends_are_told_apart_by_their_place_in_the_step() -> None:
    """Rank 0 left out a send to 1 and went on to the all-gather, in which 2 waits too."""

    def mixed(rank: int, *ops: tuple[str, int, str]) -> HangReport:
        calls = []
        for seq, (op, step, state) in enumerate(ops):
            peer = {"send": 1, "recv": 0}.get(op)
            one = call(seq, "all_gather", step, state)
            calls.append(msgspec.structs.replace(one, op=op, peer=peer, age_s=9.0 - seq))
        return report(rank, group(*calls, ranks=(0, 1, 2)), world_size=3)

    gather, waits = ("all_gather", 4, "done"), ("all_gather", 5, "waits")
    found = find(
        [
            mixed(0, ("send", 4, "done"), gather, waits),
            mixed(1, ("recv", 4, "done"), gather, ("recv", 5, "waits")),
            mixed(2, gather, waits),
        ]
    )
    assert (found.kind, found.ranks) == ("cycle", [0])
    assert sentence(found).startswith(
        "rank 0 went on to all_gather of 32 bytes float32 (group default) where "
    )
    assert "rank 2 waits in all_gather of 32 bytes float32 (#1 of group default) for rank 1" in sentence(
        found
    )


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    waits = group(*done(4, 8), call(10, "all_reduce", 5, "waits"))
    for one in (report(0, waits), report(1, group(*done(4, 8)))):
        (tmp_path / f"rank{one.rank}.json").write_bytes(msgspec.json.encode(one))
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "aorta", "hang", str(tmp_path)]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, cwd=Path(__file__).parents[3])
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("closed", [".", "hang"])
@pytest.mark.parametrize("bits", [0o000, 0o444], ids=["closed", "listed"])
def test_a_folder_that_may_not_be_read_is_one_line(tmp_path: Path, closed: str, bits: int) -> None:
    folder = tmp_path / "run"
    (folder / "hang").mkdir(parents=True)
    (folder / "hang" / "rank0.json").write_text("{}")
    with mode(folder / closed, bits):
        ended = python_without_rights("-m", "aorta", "hang", folder)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: cannot read {folder}")
    assert ended.stderr.endswith(": Permission denied\n")
    assert ended.stderr.count("\n") == 1


def periodic(step: int, first: int, every: int = 5) -> list[CallState]:
    """A whole step that gathers twice in every fifth step, before the usual all-reduce."""
    calls = [call(first, "all_gather", step, "done")] if step % every == 0 else []
    following = first + len(calls)
    return [
        *calls,
        call(following, "all_reduce", step, "done"),
        call(following + 1, "all_gather", step, "done"),
    ]


def test_what_comes_every_few_steps_is_missed_by_the_rank_that_skips_it() -> None:
    """Two ranks: the step before says that rank 1 is right, the fifth before that rank 0 is."""
    past: list[CallState] = []
    for step in range(15):
        past += periodic(step, len(past))
    kept = group(*past, call(len(past), "all_gather", 15, "waits"))
    skipped = group(*past, call(len(past), "all_reduce", 15, "waits"))
    found = find([report(0, kept, num_steps=16), report(1, skipped, num_steps=16)])
    assert (found.kind, found.ranks) == ("mismatch", [1])


def test_a_collective_that_no_other_step_had_blames_neither_of_two_ranks() -> None:
    """It may be one too many, or what comes every thousand steps and the other one skips."""
    kept = group(*done(4, 8), call(10, "all_reduce", 5, "waits"))
    rare = msgspec.structs.replace(call(10, "all_gather", 5, "waits"), op="broadcast")
    found = find([report(0, kept), report(1, group(*done(4, 8), rare))])
    assert (found.kind, found.ranks) == ("mismatch", [])
    assert "rank 1 issued broadcast of 32 bytes float32, which no other step listed here has" in sentence(
        found
    )


def test_a_rank_that_leaves_out_a_whole_step_is_told_by_the_step_of_its_calls() -> None:
    """Its calls have the usual order; what differs in the end, a step later, is a consequence."""
    past = [*done(1, 2), *done(2, 4), *done(3, 6)]
    last = msgspec.structs.replace(call(12, "all_gather", 6, "waits"), op="broadcast")
    kept = group(*past, *done(4, 8), *done(5, 10), call(12, "all_reduce", 6, "waits"))
    ahead = group(*past, *done(5, 8), *done(6, 10), last)
    found = find([report(0, kept, num_steps=7), report(1, ahead, num_steps=8)])
    assert (found.kind, found.ranks) == ("mismatch", [1])
    assert sentence(found) == (
        "rank 1 came to all_reduce of 64 bytes float32 (#8 of group default, step 4) in step 5, "
        "others in step 4: it left out collectives before"
    )


def test_of_two_groups_that_wait_for_a_rank_the_one_that_comes_first_is_named() -> None:
    def step(number: int, state: str) -> list[CallState]:
        return [msgspec.structs.replace(call(number, "all_reduce", number, state), age_s=9.0 - number)]

    def later(calls: list[CallState]) -> list[CallState]:
        return [msgspec.structs.replace(c, age_s=(c.age_s or 0) - 0.5) for c in calls]

    first, second = (1, 2), (0, 2)
    late = report(
        2,
        group(*step(4, "done"), key="cross", ranks=second),
        group(*[msgspec.structs.replace(c, age_s=6.0) for c in step(4, "done")], key="pair", ranks=first),
        world_size=3,
    )
    found = find(
        [
            report(
                0, group(*step(4, "done"), *later(step(5, "waits")), key="cross", ranks=second), world_size=3
            ),
            report(
                1, group(*step(4, "done"), *later(step(5, "waits")), key="pair", ranks=first), world_size=3
            ),
            late,
        ]
    )
    assert (found.kind, found.ranks) == ("absent", [2])
    assert found.stuck is not None
    assert found.stuck.key == "pair"

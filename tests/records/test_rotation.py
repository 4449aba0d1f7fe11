"""A file that would outgrow its limit: details of old lines go first, then old lines, never their sums."""

import msgspec

from aorta.records.newest import Follower
from aorta.records.reader import read_steps
from aorta.records.rotation import DROPPED, read_dropped
from aorta.records.schema import CollectiveRecord
from aorta.records.seal import seal_of
from aorta.records.writer import LineWriter
from tests.records.plain_records import step

CALL = CollectiveRecord(
    op="all_reduce", stream="group", group="default", ranks=[0, 1], bytes=4096, dtype="float32", seq=0,
    start_ms=1.0, end_ms=2.0, algbw_gb_s=4.1, busbw_gb_s=4.1,
)  # fmt: skip


def written(path, num_steps, max_bytes):
    with LineWriter.create(path) as writer:
        writer.max_bytes = max_bytes
        for number in range(num_steps):
            assert writer.write(step(number, collectives=[CALL] * 5, num_collectives=5, tokens=3))
    return list(read_steps(path, []))


def test_the_file_stays_below_its_limit_and_no_step_is_lost_from_the_sums(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    records = written(path, 500, max_bytes=200_000)
    dropped = read_dropped(path)
    assert path.stat().st_size <= 200_000
    assert records[-1].global_step == 499
    assert dropped.num_steps + len(records) == 500
    assert dropped.last_global_step == records[0].global_step - 1
    assert dropped.sums["step_ms"] == 10.0 * dropped.num_steps
    assert dropped.sums["tokens"] == 3 * dropped.counts["tokens"]


def test_old_lines_lose_their_details_before_any_line_goes(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    records = written(path, 500, max_bytes=200_000)
    has_details = [record.collectives is not None for record in records]
    assert has_details == sorted(has_details)  # first the bare ones, then the whole ones
    assert False in has_details
    assert all(record.num_collectives == 5 for record in records)


def test_the_first_line_says_what_went_before_it_and_the_reader_reports_no_other_gap(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    written(path, 500, max_bytes=200_000)
    notes = []
    first = next(iter(read_steps(path, notes)))
    list(read_steps(path, notes))
    assert first.gap.startswith(DROPPED)
    assert f"{read_dropped(path).num_steps} of global steps 0 to {first.global_step - 1}" in first.gap
    assert notes == []


def test_numbers_of_lines_go_on_over_rotations(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    records = written(path, 500, max_bytes=200_000)
    seals = [seal_of(line) for line in path.read_bytes().splitlines(keepends=True)]
    assert [seal.number for seal in seals] == [record.global_step for record in records]
    assert all(seal.is_whole for seal in seals)


def test_a_later_attempt_goes_on_with_a_rotated_file(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    written(path, 500, max_bytes=200_000)
    with LineWriter.append(path) as writer:
        writer.write(step(500))
    assert list(read_steps(path, []))[-1].global_step == 500


def test_lines_larger_than_the_limit_are_still_written(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    records = written(path, 3, max_bytes=100)
    assert [record.global_step for record in records] == [1, 2]


def test_a_follower_reads_on_after_a_rotation(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    follower = Follower(tmp_path)
    with LineWriter.create(path) as writer:
        writer.max_bytes = 20_000
        for number in range(200):
            writer.write(step(number))
            follower.poll()
    assert follower.ranks[0].last.global_step == 199


def test_a_follower_shows_lines_of_kernel_records(tmp_path):
    follower = Follower(tmp_path)
    with LineWriter.create(tmp_path / "rank_0_metrics.jsonl") as writer:
        writer.write(msgspec.structs.replace(step(4), source="kernels"))
    follower.poll()
    assert follower.ranks[0].last.global_step == 4

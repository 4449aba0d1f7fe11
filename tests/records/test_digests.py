"""The newest numbers of a node's ranks: what a slot holds, and which slots are believed."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from aorta.records.digests import SLOT, SLOT_BYTES, Digest, read_digests
from aorta.records.files import digest_name
from aorta.records.schema import StepRecord
from tests.records.plain_records import step


def add(digest: Digest, record: StepRecord) -> None:
    """As records.state.Tally does."""
    digest.add(record)
    digest.add_lengths(record.global_step, [record.step_ms or 0.0], record.end_unix_ns)


@pytest.fixture
def of_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks 8 and 9 of 16, the first two of their node, after 30 steps of 10 ms; the first took 900."""
    for rank in (8, 9):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank - 8))
        digest = Digest(tmp_path)
        for number in range(30):
            add(digest, step(number, rank=rank, world_size=16, step_ms=10.0 if number else 900.0, loss=0.5))
        digest.close()
    return tmp_path


def test_a_slot_is_as_long_as_it_says() -> None:
    assert SLOT.itemsize == SLOT_BYTES


def test_ranks_of_a_node_share_a_file(of_node: Path) -> None:
    assert [path.name for path in of_node.iterdir()] == [digest_name(8)]
    slots = read_digests(of_node)
    assert slots["rank"].tolist() == [8, 9]
    assert slots["global_step"].tolist() == [29, 29]
    assert slots["num_shown"].tolist() == [20, 20]
    assert slots["step_ms"].tolist() == slots["median_step_ms"].tolist() == [10.0, 10.0]
    assert slots["loss"].tolist() == [0.5, 0.5]
    assert slots["is_closed"].all()


def test_the_first_step_is_left_out(tmp_path: Path) -> None:
    digest = Digest(tmp_path)
    for number in range(3):
        add(digest, step(number, step_ms=10.0 if number else 900.0))
    digest.close()
    assert read_digests(tmp_path)["step_ms"].tolist() == [10.0]


def test_steps_that_are_not_recorded_count(tmp_path: Path) -> None:
    """Nine recorded steps of 10 ms, then a block of 30 of which only the length of 14 ms is known."""
    digest = Digest(tmp_path)
    for number in range(9):
        add(digest, step(number, step_ms=10.0, loss=0.5))
    digest.add_lengths(38, [14.0] * 30, 7_000)
    digest.close()
    (slot,) = read_digests(tmp_path)
    assert (slot["global_step"], slot["num_steps"], slot["end_unix_ns"]) == (38, 39, 7_000)
    assert (slot["median_step_ms"], slot["recorded_step_ms"], slot["loss"]) == (14.0, 10.0, 0.5)
    assert (slot["num_shown"], slot["num_recorded"]) == (20, 8)


def test_a_block_of_recorded_steps_is_most_of_what_a_slot_tells(tmp_path: Path) -> None:
    """What began with the newest eight recorded steps shows in their median, after hundreds of others."""
    digest = Digest(tmp_path)
    for number in range(300):
        record = step(number, start_unix_ns=number * 10**7)
        overlap = msgspec.structs.replace(record.overlap, exposed_ms=2.0 if number < 292 else 9.0)
        add(digest, msgspec.structs.replace(record, overlap=overlap))
    digest.close()
    assert read_digests(tmp_path)["median_exposed_ms"].tolist() == [9.0]


def test_no_slot_claims_more_ranks_than_a_job_has(tmp_path: Path) -> None:
    digest = Digest(tmp_path)
    add(digest, step(0, world_size=2**30))
    digest.close()
    assert len(read_digests(tmp_path)) == 0


def test_what_was_not_measured_is_no_number(tmp_path: Path) -> None:
    digest = Digest(tmp_path)
    add(digest, step(0, loss=None, memory=None, device=None))
    digest.close()
    (slot,) = read_digests(tmp_path)
    assert np.isnan([slot["loss"], slot["used_bytes"], slot["power_w"]]).all()


def test_a_slot_that_is_changed_or_torn_is_not_believed(of_node: Path) -> None:
    path = of_node / digest_name(8)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert read_digests(of_node)["rank"].tolist() == [9]
    path.write_bytes(data[: SLOT_BYTES + 90])
    assert len(read_digests(of_node)) == 0


def test_a_file_of_another_node_is_not_believed(of_node: Path) -> None:
    (of_node / digest_name(8)).rename(of_node / digest_name(0))
    assert len(read_digests(of_node)) == 0


def test_ranks_of_an_earlier_attempt_are_not_shown(tmp_path: Path) -> None:
    for rank, attempt in ((0, 1), (1, 0)):
        digest = Digest(tmp_path)
        add(digest, step(10 + attempt, rank=rank, world_size=2, attempt=attempt, run_id="run"))
        digest.close()
    assert read_digests(tmp_path)["rank"].tolist() == [0]


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    digest = Digest(tmp_path / "missing")
    add(digest, step(0))
    digest.close()
    assert len(read_digests(tmp_path / "missing")) == 0

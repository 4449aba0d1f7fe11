"""What is shown of a checked run: `aorta why --hazards`, the page's section, exit codes."""

import json

import msgspec
import pytest

from aorta.errors import BAD_INPUT, FINE, VIOLATED
from aorta.hazards.findings import Checked, Finding, Place, Site, missing_order, write_checked
from aorta.hazards.numbers import Call, Difference
from aorta.page.html import page
from aorta.page.write import make_report
from tests.cli.examples import run
from tests.records.run_folders import noisy_run

GATHER = Site(operation="c10d::_allgather_base_", where="train.py:8", is_collective=True)
USE = Site(operation="aten::mm", where="train.py:9", function="Block.forward", tensor="bfloat16[64, 64]")


def finding(**given) -> Finding:
    sides = {
        "earlier": Place(stream="NCCL stream 1", site=GATHER),
        "later": Place(stream="default stream", site=USE),
    }
    fields = {"kind": "race", "rank": 0, "rule": "reads what is still being written", "num_bytes": 8192}
    fields |= {"missing": missing_order("default stream", "NCCL stream 1", GATHER, USE, "race")}
    return Finding(**(fields | sides | {"count": 4, "first_step": 2} | given))


@pytest.fixture
def folder(tmp_path):
    noisy_run(tmp_path)
    return tmp_path


def checked(folder, *findings, rank=0, **given):
    write_checked(folder, Checked(rank=rank, steps=[2, 3], findings=list(findings), **given))


def test_why_hazards_tells_what_the_check_found(folder):
    checked(folder, finding(status="confirmed"))
    result = run("why", str(folder), "--hazards")
    assert result.exit_code == VIOLATED
    assert result.output.startswith("1 confirmed in 2 checked steps of 1 rank\n")
    assert "later    aten::mm at train.py:9 in Block.forward" in result.output
    assert "missing  work.wait() on default stream before aten::mm" in result.output
    assert "8,192 bytes of bfloat16[64, 64]" in result.output


@pytest.mark.parametrize(
    ("num_bytes", "of"), [(8192, " of bfloat16[64, 64]"), (64, " of bfloat16[64, 64]"), (8193, "")]
)
def test_a_tensor_that_is_too_small_for_the_bytes_is_not_named(folder, num_bytes, of):
    """A site's tensor is the first that it had."""
    checked(folder, finding(num_bytes=num_bytes))
    assert f"{num_bytes:,} bytes{of}\n" in run("why", str(folder), "--hazards").output


@pytest.mark.parametrize(("num_bytes", "of"), [(8192, " of bfloat16[64, 64]"), (128, "")])
def test_of_a_parameter_no_shape_of_another_one_is_told(folder, num_bytes, of):
    checked(folder, finding(num_bytes=num_bytes, parameter="gradient of 3.bias"))
    told = f"{num_bytes:,} bytes{of}, gradient of 3.bias\n"
    assert told in run("why", str(folder), "--hazards").output


def test_a_possible_finding_alone_violates_nothing(folder):
    checked(folder, finding(reason="delayed 3 times, the later operation never came first"))
    result = run("why", str(folder), "--hazards", "--json")
    assert result.exit_code == FINE
    assert json.loads(result.output)[0]["findings"][0]["status"] == "possible"


def test_wrong_numbers_violate(folder):
    call = {"step": 2, "group": "0,1", "number": 0, "place": 1, "op": "all_reduce", "reduction": "sum"}
    for rank, output in ((0, 8.0), (1, 3.0)):
        one = Call(**call, name="at train.py:8", inputs=[[16.0, 4.0]], outputs=[[output * output, output]])
        checked(folder, rank=rank, calls=[one])
    result = run("why", str(folder), "--hazards")
    assert result.exit_code == VIOLATED
    assert "no finding, 1 wrong number in 2 checked steps of 2 ranks" in result.output
    assert "step 2, rank 1: all_reduce at train.py:8: what comes out is off by 5" in result.output
    assert "fingerprints compared: 2" in result.output


def test_what_stays_wrong_is_told_once(folder):
    one = {"rank": 1, "place": 1, "what": "nan", "name": "head.weight", "detail": "its value is not finite"}
    checked(folder, differences=[Difference(step=step, **one) for step in (2, 3, 8)])
    lines = run("why", str(folder), "--hazards").output.splitlines()
    assert lines[0] == "no finding, 1 wrong number in 2 checked steps of 1 rank"
    assert (
        "   step 2, rank 1: head.weight: its value is not finite; wrong in 2 later checked steps too" in lines
    )


def test_a_run_that_was_not_checked_is_one_line(folder):
    result = run("why", str(folder), "--hazards")
    assert (result.exit_code, result.output.count("\n")) == (BAD_INPUT, 1)
    assert "was not checked: aorta check -- COMMAND" in result.output


def test_a_damaged_file_is_one_line(folder):
    (folder / "rank_0_hazards.json").write_text('{"rank": 0}')
    result = run("why", str(folder), "--hazards")
    assert (result.exit_code, result.output.count("\n")) == (BAD_INPUT, 1)
    assert "is not what a check writes" in result.output


def test_the_page_has_a_section_for_checked_runs_alone(folder):
    assert 'id="hazards"' not in page(make_report([folder], ["run"]))
    checked(folder, finding(), rank=0)
    source = page(make_report([folder], ["run"]))
    assert 'id="hazards"' in source
    assert "1. possible: race, 4 times, first in step 2, rank 0" in source
    assert "later    aten::mm at train.py:9 in Block.forward" in source


@pytest.mark.processes
def test_a_command_that_died_is_said_with_its_code(tmp_path):
    for script, code, words in (("exit 5", 5, "5"), ("kill -9 $$", 137, "137 (SIGKILL)")):
        result = run("check", "-o", str(tmp_path / "out"), "--", "sh", "-c", script)
        assert result.exit_code == code
        assert f"the command ended with exit code {words}" in result.output


def test_code_for_an_order_has_the_programs_names_of_streams():
    for waiting, awaited, code in (
        ("default stream", "stream side", "default_stream.wait_stream(side)"),
        ("stream 2", "stream copy_stream", "stream_2.wait_stream(copy_stream)"),
    ):
        assert missing_order(waiting, awaited, USE, USE, "race") == f"{code} before aten::mm"
    # A collective that was not asynchronous has no work to wait for, and is on the caller's stream.
    assert missing_order("stream 2", "stream 1", GATHER, USE, "race").startswith(
        "stream_2.wait_stream(stream_1)"
    )


def test_memory_that_was_handed_on_is_not_told_as_latent_too(folder):
    both = [finding(kind=kind) for kind in ("latent", "reuse")]
    checked(folder, *both, finding(kind="latent", later=Place(stream="stream 1", site=USE)))
    output = run("why", str(folder), "--hazards").output
    assert output.startswith("2 possible in 2 checked steps")


def test_a_module_is_named_where_one_issued_the_operation(folder):
    used = msgspec.structs.replace(USE, module="blocks.0.down")
    checked(folder, finding(later=Place(stream="default stream", site=used)))
    assert "first in module blocks.0.down\n" in run("why", str(folder), "--hazards").output


def test_memory_freed_too_early_asks_for_record_stream():
    text = missing_order("stream copying", "stream 1", USE, Site(operation="free"), "reuse")
    assert text == ("tensor.record_stream(stream_1) before it is freed, or copying.wait_stream(stream_1)")
    assert missing_order("host", "copy", USE, USE, "race") == "copy.synchronize() before aten::mm"


def test_findings_are_plain_data():
    assert msgspec.json.decode(msgspec.json.encode(finding()), type=Finding) == finding()

"""Operators of a traced step: times, calls, and what they achieve of what the device can do, by hand."""

import json

import numpy as np
import pytest

from aorta.account.judge.kernels import operator_rows
from aorta.cli import main
from aorta.hardware.part import load_hardware
from aorta.traces.inventory import Inventory, LaunchQueue, WorkKey, WorkTimes, _launchers
from tests.traces.kineto_events import kernel, launch, mark

H100 = load_hardware("h100")


def rows(*works, device="NVIDIA H100 80GB HBM3", first_step=0):
    """works: (key, ms of each step, launches of each step)."""
    work = {key: WorkTimes(np.array(ms), np.array(num, dtype=float)) for key, ms, num in works}
    return operator_rows([Inventory(work, 2, False, (), True, device)], first_step)


def of(operator, shapes, types, repeated="", name="k", kind="kernel"):
    return WorkKey(kind, "gemm", name, f"aten::{operator}", shapes, "", types, repeated)


def achieved(operator, shapes, types, ms, **fields):
    (row,) = rows((of(operator, shapes, types, **fields), [ms, ms], [1, 1]))
    return row.achieved, row.of_attainable


def test_time_and_calls_are_means_over_steps_and_an_operators_kernels_are_one_call():
    key = of("mm", "8x8, 8x8", "bf16, bf16")
    (row,) = rows((key, [1.0, 3.0], [4, 4]), (key._replace(name="reduce"), [0.5, 0.5], [4, 4]))
    assert (row.title, row.time_ms, row.count) == ("mm 8x8, 8x8 bf16", 2.5, 4)
    assert rows((key, [1.0, 3.0], [4, 4]), first_step=1)[0].time_ms == 3.0


def test_a_product_of_matrices_is_held_against_the_matrix_units():
    # 2 * 4096^3 = 137.4 GFLOP
    text, part = achieved("mm", "4096x4096, 4096x4096", "bf16, bf16", 0.25)
    assert text == "549.8 TFLOP/s"
    assert part == pytest.approx(137.439e9 / H100.compute.sustained_flops["bf16"] / 0.25e-3, rel=1e-4)
    assert achieved("addmm", "30, 4096x4096, 4096x4096", "bf16, bf16, bf16", 0.25)[0] == text
    assert achieved("bmm", "8x512x64, 8x64x128", "fp32, fp32", 0.1)[0] == "0.671 TFLOP/s"  # 2*8*512*64*128
    assert achieved("mm", "4096x4096, 4000x4096", "bf16, bf16", 0.25) == ("", None)  # they do not fit


def test_attention_counts_half_of_its_scores():
    q = "2x16x1024x64"  # 2 * 2 * 16 * 1024 * 1024 * 64 = 4.29 GFLOP, the other half may be masked
    text, _ = achieved("_scaled_dot_product_flash_attention", f"{q}, {q}, {q}", "bf16, bf16, bf16", 0.1)
    assert text == "42.9 TFLOP/s"
    grad = "_scaled_dot_product_flash_attention_backward"
    assert achieved(grad, f"{q}, {q}, {q}, {q}", "bf16, bf16, bf16, bf16", 0.25)[0] == text
    assert achieved("_cudnn_attention_forward", f"{q}, {q}, {q}", "bf16, bf16, bf16", 0.1)[0] == text
    behind = "2x1024x16x64"  # heads behind the length
    assert (
        achieved("_flash_attention_forward", f"{behind}, {behind}, {behind}", "bf16, bf16, bf16", 0.1)[0]
        == text
    )


def test_an_element_wise_operator_is_held_against_the_memory():
    size = "8192x8192"  # 268.4 MB in fp32, two read and one written
    text, part = achieved("add", f"{size}, {size}", "fp32, fp32", 0.4)
    assert text == "2,013 GB/s"
    assert part == pytest.approx(805.3e6 / H100.memory.sustained_hbm_bytes_per_s / 0.4e-3, rel=1e-3)
    assert achieved("add", f"{size}, {size}", "fp32, fp32", 0.4, repeated="0, 1")[0] == "1,342 GB/s"
    assert achieved("sum", size, "fp32", 0.4)[0] == "671.1 GB/s"


@pytest.mark.parametrize(
    ("operator", "shapes", "types", "fields"),
    [
        pytest.param("copy_", "8192x8192, 8192x8192", "fp32, fp32", {"kind": "copy"}, id="between-devices"),
        pytest.param("add", "64x64, 64x64", "fp32, fp32", {}, id="in-the-cache"),
        pytest.param("convolution", "8x3x64x64, 16x3x3x3", "fp32, fp32", {}, id="stride-not-known"),
        pytest.param("index_select", "8192x8192, 5", "fp32, int64", {}, id="reads-a-part"),
        pytest.param("mm", "4096x4096, 4096x4096", "c10::Weird, c10::Weird", {}, id="type-not-known"),
    ],
)
def test_what_shapes_do_not_tell_has_no_attainable(operator, shapes, types, fields):
    assert achieved(operator, shapes, types, 1.0, **fields)[1] is None


def test_without_a_known_device_there_is_a_rate_and_no_attainable():
    (row,) = rows((of("mm", "64x64, 64x64", "bf16, bf16"), [1.0, 1.0], [1, 1]), device=None)
    assert (row.achieved, row.of_attainable) == ("0.001 TFLOP/s", None)


@pytest.mark.processes  # that read the traces
def test_the_long_report_of_a_trace_lists_its_operators(tmp_path, capsys):
    events = []
    for step in range(4):
        at = 10_000 + 1000 * step
        args = {
            "Input Dims": [[4096, 4096], [4096, 4096], []],
            "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
            "Input Strides": [[4096, 1], [1, 4096], []],
        }
        op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 100, "tid": 1, "ts": at + 9, "dur": 10}
        events += [mark(at, 999, f"ProfilerStep#{step}"), op | {"args": args}, launch(at + 10, step + 1)]
        events.append(kernel(at + 20, 250, step + 1, name="nvjet_tst_128x256"))
    header = {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"rank": 0, "world_size": 1},
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(header | {"traceEvents": events}))
    quiet = ["--no-page", "-o", str(tmp_path / "report")]
    main(["report", str(path), "--long", *quiet], standalone_mode=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "mm 4096x4096, 4096x4096 bf16 0.250 ms 25 % 1 250.0 us 549.8 TFLOP/s 79 %" in said
    queue = "queue: at a launch 0 kernels and copies wait or run (median of 4 launches), none at 100 %"
    assert f"{queue} of launches; work starts 0.010 ms after its launch" in said
    main(["report", str(path), *quiet], standalone_mode=False)
    assert "TFLOP/s" not in capsys.readouterr().out


def test_the_queue_is_what_was_launched_and_has_not_finished():
    """At the launches 0, 1, 2 and, since two have ended by then, 1."""
    times = [(0, 10), (1, 20), (2, 30), (35, 40)]
    events = [launch(at, number) for number, (at, _) in enumerate(times, 1)]
    events += [kernel(start, 10, number) for number, (_, start) in enumerate(times, 1)]
    _, queue = _launchers(json.dumps({"traceEvents": events}).encode(), "t.json")
    assert queue == LaunchQueue(depth=1.0, empty_share=0.25, ahead_ms=0.0145, num_launches=4)


def test_the_scales_of_an_fp8_product_are_none_of_its_matrices():
    """2 * 8192^3 FLOP in 1 ms, row by row scaled: 1100 TFLOP/s."""
    key = of("_scaled_mm", "8192x8192, 8192x8192, 8192x1, 1x8192", "fp8, fp8, fp32, fp32")
    (row,) = rows((key, [1.0, 1.0], [1, 1]), device=None)
    assert row.achieved == "1,100 TFLOP/s"

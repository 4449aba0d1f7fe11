"""What DDP's hook for gradients and the program's code within an optimizer's step cost, of samples."""

import os

import msgspec
import pytest

from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.records.schema import HostUse, KernelSums, WorkOfStep
from aorta.why.causes.losses import hooks
from aorta.why.causes.source import pieces_of, source_of
from tests.records.run_folders import run_record
from tests.why.causes.runs import MIB, RATE, Host, causes, plain, run_of
from tests.why.causes.stacks import COMMON, TRAIN, write_stacks

SOURCE = {"source": "kernels", "modules": ["bucket 0: weight"], "host_use": HostUse(35.0, 0.0)}


def found(folder, samples, modes=None, messages=0):
    """Of two GPUs that idle for 10 of 40 ms in each step. messages: small ones, which take 1 ms each."""

    def make(rank, step, noise):
        host = Host().work(28.0 * noise.gauss(1, 0.01), "optimizer").idle(10.0)
        for _ in range(messages):
            host.comm(1.0, size=4096, module=0)
        return host.comm(2.0, size=64 * MIB), SOURCE

    program = {
        "wrappers": [{"parameter_bytes": 64 * MIB}],
        "modes": {"comm_hook": True, "comm_hook_at": ["/job/train.py", 8], **(modes or {})},
    }
    run = run_record(2, program=program if modes is not None else None)
    folder = run_of(folder, make, run)
    for rank in (0, 1):
        write_stacks(folder, rank, *samples, ("main", "rest", "runs", 10.0))
    return causes(judge(load_run(folder, "run"), 1))


@pytest.mark.parametrize(
    ("frame", "name", "is_found"),
    [
        pytest.param("of_hook", None, True, id="of-torch"),
        pytest.param("compress", "compress", True, id="of-the-program"),
        pytest.param("compress", "powerSGD_hook", False, id="another-function-of-the-program"),
        pytest.param("backward", "powerSGD_hook", False, id="the-engine-itself"),
        pytest.param("of_hook", "hook_then_optimizer_wrapper", False, id="that-updates-weights"),
    ],
)
def test_a_hook_costs_what_backward_passes_are_in_it(tmp_path, frame, name, is_found):
    """15 of 40 ms by samples; 64 MiB take 2 ms at the run's 33.6 GB/s. No more is lost than the 10 ms
    that devices idle and the 2 ms of communication."""
    samples = (frame, "backward", "runs", 15.0), ("backward", "backward", "runs", 15.0)
    hooks = [
        one for one in found(tmp_path / "run", samples, {"comm_hook_name": name}) if "hook" in one.subject
    ]
    assert len(hooks) == is_found
    for one in hooks:
        named = "" if name is None else f" {name}()"
        assert one.subject == f"DDP's communication hook{named} on all ranks in train.py:8"
        assert one.ms == pytest.approx(12.0, rel=0.02)
        assert one.change.startswith("leave it out (register_comm_hook")


def test_without_a_hook_none_is_named(tmp_path):
    samples = [("of_hook", "backward", "runs", 15.0)]
    assert not [one for one in found(tmp_path / "run", samples) if "hook" in one.subject]


def test_small_messages_of_a_hook_are_its_own(tmp_path):
    samples = ("of_hook", "backward", "runs", 15.0), ("backward", "backward", "runs", 15.0)
    kinds = [one.kind for one in found(tmp_path / "run", samples, {}, messages=20)]
    assert "program_code" in kinds
    assert "small_messages" not in kinds


@pytest.mark.parametrize(
    ("frame", "also_in", "is_found"),
    [
        pytest.param("watch", "optimizer", True, id="a-callback"),
        pytest.param("own_step", "optimizer", False, id="an-optimizer-of-the-program"),
        pytest.param("training", "forward", False, id="what-computes-the-loss"),
        pytest.param("of_training", "optimizer", False, id="operators-of-a-loss"),
        pytest.param("main", "optimizer", False, id="the-loop"),
    ],
)
def test_code_that_a_library_calls_within_an_optimizers_step(tmp_path, frame, also_in, is_found):
    samples = (frame, "optimizer", "runs", 15.0), (frame, also_in, "runs", 5.0)
    own = [
        one for one in found(tmp_path / "run", samples) if "within the optimizer's step" in str(one.evidence)
    ]
    assert len(own) == is_found
    for one in own:
        assert one.line.text == "Net.on_before_optimizer_step(), train.py:60"
        assert "in one step of N" in one.change


@pytest.mark.parametrize(
    ("frame", "is_found"),
    [
        pytest.param("outputs", True, id="python-of-a-hook"),
        pytest.param("of_outputs", True, id="operators-of-a-hook"),
        pytest.param("own_forward", False, id="a-forward-pass"),
        pytest.param("of_timed", False, id="a-forward-pass-that-is-wrapped"),
    ],
)
def test_what_modules_call_beside_their_forward_pass_is_a_hook(tmp_path, frame, is_found):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (frame, "forward", "runs", 8.0))
    hooks = [
        one for one in causes(judge(load_run(folder, "run"))) if "call it as a hook" in str(one.evidence)
    ]
    assert [one.line.text for one in hooks] == ["keep_outputs(), train.py:90"] * is_found
    for one in hooks:
        assert one.ms == pytest.approx(8.0, rel=0.2)
        assert "register a hook once" in one.change


@pytest.mark.parametrize(
    ("model_bytes", "in_hooks_ms", "most_ms"),
    [
        pytest.param(20e9, 8.0, 15.0 - 20 / RATE, id="beside-the-model"),
        pytest.param(0.0, 8.0, None, id="of-a-model-that-was-not-counted"),
        pytest.param(80e9, 8.0, None, id="the-model-may-take-all"),
        pytest.param(20e9, 1.0, None, id="hardly-ever-seen-in-them"),
    ],
)
def test_hooks_beside_which_a_device_is_busy_take_at_most_what_the_model_leaves(
    tmp_path, model_bytes, in_hooks_ms, most_ms
):
    """Of 15 ms of kernels that memory bounds."""
    devices = [{"kind": "cuda", "name": "NVIDIA H200", "memory_bytes": 80 << 30}]
    run = run_record(2, work=WorkOfStep(flops=1e9, bytes=model_bytes), devices=devices)
    classes = {"elementwise": (9.0, 90), "copy": (4.0, 40), "normalization": (2.0, 20), "gemm": (13.0, 30)}
    kernels = {"source": "kernels", "kernels": KernelSums(num_kernels=180, classes=classes, top=[])}
    folder = run_of(tmp_path, lambda rank, step, noise: (plain(noise), kernels), run)
    for rank in (0, 1):
        hooks_ms = ("outputs", "forward", "runs", in_hooks_ms)
        write_stacks(folder, rank, ("norm", "forward", "runs", 40.0 - in_hooks_ms), hooks_ms)
    told = [one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "program_code"]
    assert [one.ms for one in told] == ([] if most_ms is None else [pytest.approx(most_ms, rel=0.02)])
    for one in told:
        assert (one.limit, one.line.text) == ("at most", "keep_outputs(), train.py:90")
        assert "register a hook once" in one.change


@pytest.mark.parametrize(
    ("frame", "is_found"), [("replicate", True), ("parallel", False), ("scatter", False)]
)
def test_copies_of_one_process_for_several_devices(tmp_path, frame, is_found):
    """A tenth of 40 ms, at least: that threads take turns is not in it."""
    samples = (frame, "forward", "runs", 3.0), ("scatter", "forward", "runs", 1.0)
    samples += (("backward", "backward", "runs", 26.0),)
    copies = [one for one in found(tmp_path / "run", samples) if "DataParallel" in one.subject]
    assert len(copies) == is_found
    for one in copies:
        assert (
            one.subject == "weights sent to each device by DataParallel on all ranks in main(), train.py:20"
        )
        assert (one.ms, one.why_no_interval[:8]) == (pytest.approx(4.0, rel=0.02), "at least")
        assert one.change.startswith("DistributedDataParallel, with a process for each device")


REGISTERS = "for block in model:\n        block.register_forward_hook(keep_outputs)\n"


@pytest.mark.parametrize(
    ("text", "function", "is_told"),
    [
        pytest.param(f"def main():\n    for step in range(9):\n      {REGISTERS}        loss.backward()",
                     "main", True, id="in-the-loop"),
        pytest.param(f"def main():\n    {REGISTERS}    for step in range(9):\n        loss.backward()",
                     "main", False, id="before-the-loop"),
        pytest.param(f"def keep_outputs():\n    {REGISTERS}", "keep_outputs", True, id="in-a-function"),
        pytest.param(f"def keep_outputs():\n    {REGISTERS}    handle.remove()", "keep_outputs", False,
                     id="they-are-removed"),
        pytest.param(f"def set_up():\n    {REGISTERS}", "set_up", False, id="in-a-function-of-no-step"),
    ],
)  # fmt: skip
def test_hooks_that_each_step_registers_anew(tmp_path, monkeypatch, text, function, is_told):
    script = tmp_path / "train.py"
    script.write_text(text)
    os.utime(script, (1, 1))
    folder = run_of(tmp_path / "run", lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("outputs", "forward", "runs", 8.0))
    judged = judge(load_run(folder, "run"))
    source = source_of(str(script), run_record(started_unix_ns=10**18))
    pieces = [
        one._replace(at=msgspec.structs.replace(one.at, file=TRAIN))
        for one in pieces_of([str(script)], run_record(started_unix_ns=10**18))
    ]
    monkeypatch.setattr(hooks, "pieces_of_run", lambda judged: pieces)
    monkeypatch.setattr(hooks, "source_of", lambda file, record: source)
    (finding,) = hooks.code_in_hooks(judged, account_of(judged), [])
    place = finding.facts["registered"]
    assert (place is not None) == is_told
    assert place is None or place.startswith(f"{function}(), train.py:")

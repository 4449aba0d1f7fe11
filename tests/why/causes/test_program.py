"""Remedies name what the program has set, and do not offer what is in force."""

import os
import re
from types import SimpleNamespace

import msgspec
import pytest

from aorta.account.judge.cores import CoresHad
from aorta.account.judge.judged import dataset, judge
from aorta.account.load.open import load_run
from aorta.records.schema import CallSite, CallSites, CallsOfFewRows, WorkOfStep
from aorta.why.causes import program as program_module
from aorta.why.causes.program import (
    OFFERS,
    STACKS,
    crowded_at,
    is_one_unit,
    program_of,
    settings_text,
    stack_of,
    threads_variable,
    told_by_kernels,
    without_in_force,
    workers_of,
)
from aorta.why.causes.rank import found_causes
from aorta.why.causes.rules import rules
from aorta.why.causes.text import notes, nothing_text
from tests.records.run_folders import run_record
from tests.why.causes.runs import MIB, Host, causes, run_of, slow_loader
from tests.why.causes.stacks import COMMON, TRAIN, write_stacks

LOADER = {"num_workers": 0, "num_batches": 99, "num_epochs": 1, "site": "train.py:41"}
DDP = {
    "parameter_bytes": 4,
    "bucket_cap_mb": 25.0,
    "broadcast_buffers": True,
    "num_buffers": 2,
    "buffer_bytes": 3 * MIB,
    "site": "train.py:50",
}
H100 = "NVIDIA H100 80GB HBM3"
ADAM = {"parameter_bytes": 4, "kind": "Adam", "foreach": None, "fused": None, "site": "train.py:60"}


WHOLE_MODEL = {"num_parameters": 157, "parameter_bytes": 400 * MIB, "times": 1}
OF_300 = {"num_parameters": 302, "num_groups": 302, "num_unlike_groups": 2}


def run_with(**program):
    return msgspec.structs.replace(run_record(2), program={name: [row] for name, row in program.items()})


def advice(folder, make, **program):
    return causes(judge(load_run(run_of(folder, make, run_with(**program)), "run")))[0].change


def slow_epochs(rank, step, noise):
    return Host().work(60.0 * (step % 8 == 0), "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)


def slow_optimizer(rank, step, noise):
    return (
        Host().work(30.0 * noise.gauss(1, 0.01)).comm(2.0).work(24.0, "optimizer", "SGD", size=4 * MIB // 10)
    )


def broadcasts(rank, step, noise):
    return Host().work(30.0 * noise.gauss(1, 0.01)).comm(14.0, op="broadcast")


@pytest.mark.parametrize(
    ("make", "program", "text"),
    [
        pytest.param(slow_loader, {"loaders": LOADER}, "num_workers=0 at train.py:41: set", id="no-workers"),
        pytest.param(
            slow_loader,
            {"loaders": LOADER | {"is_on_device": True}},
            "cut batches out of the device's tensors",
            id="of-a-device",
        ),
        pytest.param(
            slow_loader,
            {"loaders": LOADER | {"num_workers": 3}},
            "num_workers=3 at train.py:41 do",
            id="few-workers",
        ),
        pytest.param(
            slow_loader,
            {"loaders": LOADER | {"num_batches": 30, "num_epochs": 30}},
            "take batches of one iterator",
            id="an-iterator-for-each-batch",
        ),
        pytest.param(
            slow_epochs,
            {"loaders": LOADER | {"num_workers": 3, "num_epochs": 9}},
            "persistent_workers=True at train.py:41",
            id="workers-start-anew",
        ),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | {"foreach": False}},
            "fused=True at train.py:60: Adam",
            id="foreach-is-off-on-a-CPU-anyhow",
        ),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | {"fused": True}},
            "fused=True is in force",
            id="fused-in-force",
        ),
        pytest.param(slow_optimizer, {"optimizers": ADAM}, "fused=True at train.py:60: Adam", id="unfused"),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | {"kind": "SGD"}},
            "fused=True where the optimizer has it (Adam, AdamW, Adagrad, SGD with momentum; also on a CPU)",
            id="fused-of-any-optimizer",
        ),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | {"kind": "DistributedShampoo"}},
            "DistributedShampoo at train.py:60 is none of torch.optim",
            id="optimizer-of-another",
        ),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | OF_300},
            "302 parameter groups of 302 parameters at train.py:60: make two, as with and without weight"
            " decay, and set fused=True there",
            id="a-group-for-each-parameter",
        ),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | OF_300 | {"fused": True}},
            "make two, as with and without weight decay; a fused kernel",
            id="a-group-for-each-parameter-fused",
        ),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | OF_300 | {"num_unlike_groups": 100}},
            "fused=True at train.py:60: Adam",
            id="groups-that-differ",
        ),
        pytest.param(
            slow_optimizer,
            {"optimizers": ADAM | OF_300 | {"num_groups": 2}},
            "fused=True at train.py:60: Adam",
            id="two-groups",
        ),
        pytest.param(broadcasts, {"wrappers": DDP}, "at train.py:50 (2 buffers, 3.0 MiB)", id="buffers"),
        pytest.param(broadcasts, {"wrappers": DDP | {"num_buffers": 0}}, "has no buffers", id="no-buffers"),
    ],
)
def test_advice_says_what_is_set_where(tmp_path, make, program, text):
    assert text in advice(tmp_path, make, **program)


def test_parameter_groups_are_placed_where_the_program_makes_them(tmp_path):
    path = tmp_path / "train.py"
    path.write_text('def grouped(model):\n    return [{"params": [one]} for one in model.parameters()]\n')
    program = {"optimizers": [ADAM | OF_300]}
    record = run_record(2, program=program, command=[str(path)], started_unix_ns=2**62)
    (cause,) = causes(judge(load_run(run_of(tmp_path / "run", slow_optimizer, record), "run")))
    assert ", whose groups are made in grouped(), train.py:2" in cause.subject
    assert cause.change.endswith(": at grouped(), train.py:2")


@pytest.mark.parametrize(
    ("torch", "option"),
    [("2.12.1", "broadcast_buffers"), ("2.13.0+cpu", "forward_sync_buffers"), (None, "broadcast_buffers")],
)
def test_ddps_option_is_called_as_the_runs_torch_calls_it(tmp_path, torch, option):
    record = run_with(wrappers=DDP)
    record = msgspec.structs.replace(record, versions=record.versions | {"torch": torch})
    (cause,) = causes(judge(load_run(run_of(tmp_path / "run", broadcasts, record), "run")))
    assert cause.change.startswith(f"DistributedDataParallel({option}=False) at train.py:50")


@pytest.mark.parametrize(
    ("source", "num_ranks", "environment", "text"),
    [
        ("kernels", 2, {"NCCL_P2P_DISABLE": "1"}, "leave NCCL_P2P_DISABLE=1 out"),
        ("kernels", 2, {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"}, ""),
        ("host", 2, {"NCCL_P2P_DISABLE": "1"}, ""),  # gloo does not read it
        ("host", 2, {"TORCH_DISTRIBUTED_DEBUG": "detail"}, "leave TORCH_DISTRIBUTED_DEBUG=DETAIL out"),
        ("kernels", 2, {"TORCH_NCCL_BLOCKING_WAIT": "yes"}, "leave TORCH_NCCL_BLOCKING_WAIT=1 out"),
        ("kernels", 2, {"NCCL_BLOCKING_WAIT": "0"}, ""),
        ("kernels", 1, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, ""),
        ("host", 2, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, ""),
    ],
)
def test_what_slows_a_loss_down_in_the_environment_is_said_before_its_remedy(
    monkeypatch, source, num_ranks, environment, text
):
    monkeypatch.setattr(program_module, "pieces_of_run", lambda judged: [])
    run = SimpleNamespace(source=source, noted=run_record(num_ranks, environment=environment))
    settings = {*rules()["transfer"].settings, *rules()["small_messages"].settings}
    assert settings_text(settings, run).startswith(text)
    assert bool(settings_text(settings, run)) == bool(text)


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_setting_that_slows_transfers_down_is_named_from_a_smaller_share_with_its_line(tmp_path, value):
    """4 of 40 ms, which gradients may take otherwise."""
    path = tmp_path / "train.py"
    path.write_text(f'import os\n\nos.environ["NCCL_P2P_DISABLE"] = "{value}"\n')
    record = run_record(
        2, program={"wrappers": [DDP | {"times": 1}]}, environment={"NCCL_P2P_DISABLE": value},
        command=[str(path)], started_unix_ns=2**62,
    )  # fmt: skip

    def make(rank, step, noise):
        host = Host().work(36.0 * noise.gauss(1, 0.01))
        return host.comm(8.0, size=64 << 20, start=host.at - 4).idle(4.0), {"source": "kernels"}

    named = causes(judge(load_run(run_of(tmp_path / "run", make, record), "run")))
    found = [one for one in named if one.kind == "transfer"]
    assert len(found) == (value == "1")
    for one in found:
        assert one.change.startswith(
            "leave NCCL_P2P_DISABLE=1 out of the environment (set in train.py:3), where"
        )
        assert any("64.0 MiB of all_reduce a step move at up to 8.4" in text for text in one.evidence)


@pytest.mark.parametrize(
    ("value", "hidden_ms", "device", "told"),
    [
        pytest.param("1", 8.0, H100, "; the links of NVIDIA H100 SXM 80 GB carry 450", id="hidden"),
        pytest.param("1", 8.0, "NVIDIA H100 PCIe", "", id="links-not-known"),
        pytest.param("0", 8.0, H100, None, id="not-set"),
        pytest.param("1", 0.2, H100, None, id="hardly-communicates"),
        pytest.param("1", 4.0, H100, None, id="in-the-cause-already"),
    ],
)
def test_a_setting_that_slows_transfers_down_is_said_where_compute_hides_them(
    tmp_path, value, hidden_ms, device, told
):
    """The last is half exposed, and a cause."""
    path = tmp_path / "train.py"
    path.write_text(f'import os\n\nos.environ["NCCL_P2P_DISABLE"] = "{value}"\n')
    record = run_record(
        2, program={"wrappers": [DDP | {"times": 1}]}, environment={"NCCL_P2P_DISABLE": value},
        command=[str(path)], started_unix_ns=2**62,
        devices=[{"kind": "cuda", "index": index, "name": device} for index in (0, 1)],
    )  # fmt: skip

    def make(rank, step, noise):
        host = Host().work(36.0 * noise.gauss(1, 0.01))
        size_ms = 8.0 if hidden_ms == 4.0 else hidden_ms
        host = host.comm(size_ms, size=64 << 20, start=host.at - hidden_ms)
        return host.idle(max(size_ms - hidden_ms, 0.0)), {"source": "kernels"}

    judged = judge(load_run(run_of(tmp_path / "run", make, record), "run"))
    found = found_causes(judged)
    assert [one.kind for one in found.listed] == ["transfer"] * (hidden_ms == 4.0)
    texts = [text for text in notes(found, judged) if "NCCL_P2P" in text]
    assert len(texts) == (told is not None)
    for text in texts:
        assert re.sub(r"8\.(39|4\d)", "8.4", text) == (
            "NCCL_P2P_DISABLE=1 is in the environment (set in train.py:3): GPUs of one machine send through"
            f" host memory. Calls of all_reduce move at up to 8.4 GB/s{told}. What that costs was not"
            " measured: try without, where nothing needs it."
        )
        assert not nothing_text(dataset("a", [judged]), found).startswith("Nothing worth changing")


def test_objects_that_are_sent_in_every_step_are_named_with_what_to_send_instead(tmp_path):
    """3 of 33 ms, on a CPU: all_gather_object gathers a size, then the pickled bytes."""

    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01)).comm(3.0, op="all_gather", size=120_000)

    place = {"file": "/job/train.py", "line": 16, "function": "share"}
    site = CallSite(**place, op="all_gather", moves="an object", num_calls=48, bytes=9)
    judged = judge(load_run(run_of(tmp_path / "run", make), "run"), 1)
    assert not causes(judged)
    sites = CallSites(num_steps=24, sites=[site])
    run = msgspec.structs.replace(judged, sites=lambda rank: sites)
    first = causes(run)[0]
    assert first.kind == "transfer"
    assert first.change.startswith("send tensors of a known size instead of pickled objects")
    assert first.change.endswith(": at share(), train.py:16")


@pytest.mark.parametrize(
    ("moves", "calls", "told_ms"),
    [
        pytest.param("an object", 48, 5.33, id="each-step"),
        pytest.param("an object", 2, None, id="one-step-of-24"),
        pytest.param("a tensor", 48, None, id="a-tensor"),
    ],
)
def test_objects_cost_what_samples_show_of_their_line(tmp_path, moves, calls, told_ms):
    """Of a step of 32 ms the thread is in their line for 10 of 60 that were sampled, and the calls themselves
    take 0.1 ms."""

    def make(rank, step, noise):
        host = Host().work(20.0 * noise.gauss(1, 0.01)).idle(11.9).comm(0.1, op="all_gather", size=900)
        return host, {"source": "kernels"}

    folder = run_of(tmp_path / "run", make)
    for rank in (0, 1):
        write_stacks(
            folder, rank, COMMON, ("of_later", "rest", "runs", 10.0), ("backward", "backward", "runs", 20.0)
        )
    judged = judge(load_run(folder, "run"), 1)
    place = {"file": TRAIN, "line": 24, "function": "main"}
    site = CallSite(**place, op="all_gather", moves=moves, num_calls=calls, bytes=9)
    sites = CallSites(num_steps=24, sites=[site])
    found = causes(msgspec.structs.replace(judged, sites=lambda rank: sites))
    of_objects = [one for one in found if one.origin == "object"]
    assert len(of_objects) == (told_ms is not None)
    for one in of_objects:
        assert one.ms == pytest.approx(told_ms, rel=0.1)
        assert one.subject.startswith("exposed pickling and transfer: all_gather of an object in main()")
        assert one.check.endswith("step_ms should fall")


def test_buffers_are_named_apart_from_gradients_and_from_a_smaller_share_on(tmp_path):
    """4 of 40 ms, on a CPU, where all of the transfer, 7 ms, is below the share for gradients."""

    def make(rank, step, noise):
        return Host().work(33.0 * noise.gauss(1, 0.01)).comm(4.0, op="broadcast").comm(3.0)

    place = {"file": "/job/train.py", "line": 12, "function": "train", "num_calls": 24, "bytes": 9}
    sites = [
        CallSite(**place, op="broadcast", moves="buffers"),
        CallSite(**place, op="all_reduce", moves="gradients, bucket 0: head.weight"),
    ]
    judged = judge(load_run(run_of(tmp_path / "run", make), "run"), 1)
    assert not causes(judged)
    run = msgspec.structs.replace(judged, sites=lambda rank: CallSites(num_steps=24, sites=sites))
    (cause,) = causes(run)
    assert cause.subject.startswith("exposed transfer: broadcast")
    assert cause.ms == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(
    ("frame", "copied_ms", "told_ms"),
    [
        pytest.param("sends_buffers", 6.0, 10.0, id="ddp-s-function"),
        pytest.param("sends_buffers", 0.0, 4.0, id="no-more-than-the-transfer"),
        pytest.param("backward", 6.0, 4.0, id="of-another-function"),
    ],
)
def test_copies_of_buffers_beside_their_broadcast_are_of_its_loss(tmp_path, frame, copied_ms, told_ms):
    """4 of 40 ms are exposed; samples show what ranks do in the function that copies and broadcasts them."""

    def make(rank, step, noise):
        return Host().work(33.0 * noise.gauss(1, 0.01)).comm(4.0, op="broadcast").comm(3.0)

    place = {"file": "/job/train.py", "line": 12, "function": "train", "num_calls": 24, "bytes": 9}
    site = CallSite(**place, op="broadcast", moves="buffers")
    folder = run_of(tmp_path / "run", make)
    for rank in (0, 1):
        waits = ("sends_buffers", "communication", "sleeps", 4.0)
        others = ("model", "forward", "runs", 36.0 - copied_ms)
        write_stacks(folder, rank, waits, (frame, "forward", "runs", copied_ms), others)
    judged = judge(load_run(folder, "run"), 1)
    run = msgspec.structs.replace(judged, sites=lambda rank: CallSites(num_steps=24, sites=[site]))
    (cause, *_) = [one for one in causes(run) if one.kind == "transfer"]
    assert cause.ms == pytest.approx(told_ms, rel=0.05)


def test_barriers_are_named_apart_from_gradients(tmp_path):
    """3 of 45 ms, on a CPU."""

    def make(rank, step, noise):
        host = Host().work(35.0 * noise.gauss(1, 0.01))
        for _ in range(3):
            host.comm(1.0, op="barrier", size=0)
        return host.comm(7.0)

    place = {"file": "/job/train.py", "line": 12, "function": "train", "num_calls": 24, "bytes": 0}
    sites = CallSites(num_steps=24, sites=[CallSite(**place, op="barrier", moves="nothing")])
    judged = judge(load_run(run_of(tmp_path / "run", make), "run"), 1)
    run = msgspec.structs.replace(judged, sites=lambda rank: sites)
    (cause,) = causes(run)
    assert cause.subject.startswith("exposed transfer: barrier")
    assert cause.ms == pytest.approx(3.0, rel=0.05)
    assert cause.change.startswith("remove the barriers")


def test_without_a_description_the_advice_is_general(tmp_path):
    assert "at train.py" not in advice(tmp_path, slow_loader)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param({"wrappers": DDP | {"bucket_cap_mb": 1.0}}, "buckets_small", id="buckets"),
        pytest.param({"wrappers": DDP | {"gradient_as_bucket_view": True}}, "bucket_view", id="view"),
        pytest.param(
            {"units": {"num_parameters": 9, "reshard_after_forward": True, "times": 4}}, "blocks", id="blocks"
        ),
        pytest.param({"units": {"num_parameters": 1, "times": 4}}, "resharded_not", id="reshard"),
        pytest.param({"units": {"param_dtype": "bfloat16"}}, "reduced_narrow", id="reduced-as-gathered"),
        pytest.param({"units": {"param_dtype": "bfloat16"}}, "gathered_narrow", id="gathered"),
        pytest.param({"units": {"prefetches": True}}, "prefetched", id="prefetched"),
        pytest.param({"loaders": LOADER | {"pin_memory": True}}, "pinned", id="pinned"),
        pytest.param({"optimizers": ADAM | {"kind": "RMSprop"}}, "never_fused", id="no-fused-form"),
    ],
)
def test_names_that_rules_ask_for(program, name):
    names, _ = program_of(run_with(**program))
    assert name in names
    assert names <= set(STACKS)


@pytest.mark.parametrize(
    ("kind", "unit", "has_fused"),
    [
        pytest.param("SGD", "fully_shard", False, id="no-operator-for-DTensors"),
        pytest.param("AdamW", "fully_shard", True, id="AdamW"),
        pytest.param("SGD", "FullyShardedDataParallel", True, id="plain-tensors"),
    ],
)
def test_a_fused_form_is_offered_as_far_as_parameters_of_units_take_it(kind, unit, has_fused):
    names, _ = program_of(run_with(optimizers=ADAM | {"kind": kind}, units={"kind": unit}))
    assert ("never_fused" in names) != has_fused
    offered = "foreach=False: leave it out, or set fused=True"
    assert (without_in_force(offered, names) == offered) == has_fused


@pytest.mark.parametrize(
    ("modes", "names"),
    [
        pytest.param({"num_threads": 1, "num_cores": 8}, {"few_threads"}, id="one-thread"),
        pytest.param({"num_threads": 2, "num_cores": 8, "comm_hook": True}, {"comm_hook"}, id="hook"),
    ],
)
def test_modes_that_are_in_force_have_names(modes, names):
    assert program_of(msgspec.structs.replace(run_record(2), program={"modes": modes}))[0] == names


def test_segments_that_can_grow_are_not_offered_twice(tmp_path):
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    record = msgspec.structs.replace(run_record(2), environment=environment)
    stack = stack_of(judge(load_run(run_of(tmp_path, slow_optimizer, record), "run")))
    assert "expandable" in stack <= set(STACKS)
    text = without_in_force(rules()["memory"].change[-1].set, stack)
    assert text == "activation checkpointing or a smaller micro-batch"


@pytest.mark.parametrize(
    ("changes", "is_one"), [({}, True), ({"times": 2}, False), ({"parameter_bytes": 40 * MIB}, False)]
)
def test_a_model_in_units_or_a_small_one_is_not_one_unit_too_large(changes, is_one):
    assert is_one_unit(run_with(units=WHOLE_MODEL | changes)) == is_one


@pytest.mark.parametrize(("source", "is_told"), [("kernels", True), ("host", False)])
def test_a_whole_model_that_is_gathered_at_once_is_told_to_be_units(tmp_path, source, is_told):
    """Its weights are gathered before anything is computed, and its gradients reduced behind everything."""

    def make(rank, step, noise):
        host = Host().comm(6.0, "all_gather", size=400 * MIB, module=0).work(30.0 * noise.gauss(1, 0.01))
        host.comm(9.0, "reduce_scatter", size=400 * MIB, module=0)
        return host, {"source": source, "modules": ["root"]}

    unit = WHOLE_MODEL | {"kind": "fully_shard", "site": "train.py:70", "param_dtype": "bfloat16"}
    told = "fully_shard([block, next_block, ...])"
    change = advice(tmp_path, make, units=unit)
    assert all((text in change) == is_told for text in (told, "all of the model is one unit"))
    assert not is_told or "at train.py:70" in change
    assert not is_told or "reduce_dtype" not in change


@pytest.mark.parametrize(
    ("program", "is_sharded"), [({}, True), ({"units": []}, False)], ids=["unread", "none"]
)
def test_gathers_and_reductions_of_shards_are_fully_shards_where_nobody_looked_for_units(
    tmp_path, program, is_sharded
):
    def make(rank, step, noise):
        host = Host().comm(6.0, "all_gather").work(30.0 * noise.gauss(1, 0.01)).comm(9.0, "reduce_scatter")
        return host, {"source": "kernels"}

    record = msgspec.structs.replace(run_record(2), program=program)
    stack = stack_of(judge(load_run(run_of(tmp_path, make, record), "run")))
    assert ("fsdp2" in stack) == is_sharded


@pytest.mark.parametrize(
    ("inner", "is_kept"), [(False, True), (True, False)], ids=["kept-but-for-the-model's", "resharded"]
)
def test_parameters_that_units_keep_are_not_to_be_kept(inner, is_kept):
    """Of the unit of the model, which is made last, True is noted and nothing is gathered again."""
    blocks, model = {"reshard_after_forward": inner, "times": 6}, {"reshard_after_forward": True, "times": 1}
    run = msgspec.structs.replace(run_record(2), program={"units": [blocks, model]})
    assert ("resharded_not" in program_of(run)[0]) == is_kept


def test_units_that_reduce_in_fp32_may_do_so_in_less():
    names, _ = program_of(run_with(units={"param_dtype": "bfloat16", "reduce_dtype": "float32"}))
    assert "gathered_narrow" in names
    assert "reduced_narrow" not in names


def test_any_json_is_read_as_a_program():
    for program in (
        {"loaders": 7},
        {"loaders": [3, None]},
        {"modes": []},
        {"wrappers": [{"bucket_cap_mb": "x"}]},
    ):
        program_of(msgspec.structs.replace(run_record(2), program=program))


def test_joining_groups_is_not_all_where_each_parameter_is_updated_alone():
    """On a GPU; on a CPU nothing but a fused form updates several at once."""
    stack = {"foreach_off", "many_groups", "unfused", "any"}
    first = next(change for change in rules()["optimizer"].change if set(change.stack) <= stack)
    assert first.set.startswith(
        "foreach=False at {optimizer_site}: leave it out, or set fused=True, and make"
    )


@pytest.mark.parametrize("name", OFFERS)
def test_no_rule_offers_what_is_in_force(name):
    for rule in rules().values():
        for change in rule.change:
            text = without_in_force(change.set, frozenset([name, "any"]))
            assert text
            assert "in force" in text or not re.search(OFFERS[name], text)


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("torch.compile(model) (mode='x, y'), larger micro-batches", "larger micro-batches"),
        ("larger micro-batches, fused optimizer; pin", "larger micro-batches, fused optimizer; pin"),
        ("torch.compile(model), or larger batches", "larger batches"),
        ("torch.compile(model)", "what is known to help is in force"),
        ("torch.compile(model): it is in force", "torch.compile(model): it is in force"),
    ],
)
def test_a_remedy_loses_the_parts_that_are_set(change, left):
    assert without_in_force(change, frozenset(["compile"])) == left


def test_kernels_that_ran_tell_what_is_in_force():
    """A trace or an old record holds no settings of the program, and its kernels all the same."""
    adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"
    assert told_by_kernels([adam, "sm90_xmma_gemm_bf16"]) == {"fused"}
    assert told_by_kernels(["triton_poi_fused_add_mul_3"]) == {"compile"}
    assert told_by_kernels(["_my_triton_kernel", "vectorized_elementwise_kernel"]) == frozenset()


@pytest.mark.parametrize(
    ("cores", "num_ranks", "core_taken", "names", "workers"),
    [
        pytest.param(16, 2, 0.0, set(), 4, id="seven-of-eight-free"),
        pytest.param(2, 1, 0.0, set(), 1, id="one-free"),
        pytest.param(2, 2, 0.0, {"no_core"}, 1, id="none-free"),
        pytest.param(16, 2, 0.2, {"no_core"}, 4, id="others-have-them"),
        pytest.param(0, 2, 0.2, set(), 4, id="not-counted"),
    ],
)
def test_workers_are_offered_as_far_as_there_are_cores_for_them(cores, num_ranks, core_taken, names, workers):
    run = msgspec.structs.replace(run_record(num_ranks), program={"modes": {"num_cores": cores}})
    found, facts = workers_of(run, core_taken, waited_ms=9.0)
    assert (found, facts["workers"]) == (names, str(workers))


@pytest.mark.parametrize(
    ("cores", "rest_ms", "workers", "leaves"),
    [
        pytest.param(16, 30.0, 4, "", id="few-are-enough"),
        pytest.param(16, 15.0, 8, "", id="eight-are"),
        pytest.param(64, 2.0, 16, "", id="as-many-as-are-offered"),
        pytest.param(2, 30.0, 1, " (which leaves 90.0 ms of the wait)", id="one-is-not"),
    ],
)
def test_so_many_workers_are_offered_as_keep_up(cores, rest_ms, workers, leaves):
    """Of a wait of 120 ms in a step."""
    run = msgspec.structs.replace(run_record(1), program={"modes": {"num_cores": cores}})
    _, facts = workers_of(run, 0.0, 120.0, None, rest_ms)
    assert (facts["workers"], facts["leaves"]) == (str(workers), leaves)


@pytest.mark.parametrize(
    ("ranks", "others", "names"),
    [
        pytest.param(1.0, 0.5, set(), id="half-a-core-idles"),
        pytest.param(1.9, 0.0, {"no_core"}, id="threads-of-torch-have-them"),
        pytest.param(1.0, 1.0, {"no_core"}, id="other-programs-have-them"),
    ],
)
def test_workers_need_cores_that_idle_as_measured(ranks, others, names):
    """Of two; a rank's thread is ready at once, so that nothing else tells."""
    run = msgspec.structs.replace(run_record(1), program={"modes": {"num_cores": 2}})
    assert workers_of(run, 0.0, 9.0, CoresHad(2, ranks, 0.0, others))[0] == names


def test_rows_of_a_tensor_are_indexed_at_once_and_need_no_workers(tmp_path):
    folder = run_of(tmp_path / "run", slow_loader, run_record(2, program={"loaders": [LOADER]}))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("row", "data", "runs", 9.0))
    (first, *_) = causes(judge(load_run(folder, "run")))
    assert (first.kind, first.line.text) == ("data_loading", "main(), train.py:20")
    assert first.change.startswith("make whole batches at once")
    assert "batch_size=None at train.py:41" in first.change


@pytest.mark.parametrize(
    ("frame", "loader", "is_told"),
    [
        pytest.param("collate", {"dataset": "TensorDataset", "batch_size": 4096}, True, id="joined"),
        pytest.param("row", {"dataset": "Subset", "batch_size": 4096}, True, id="part-of-tensors"),
        pytest.param("collate", {"dataset": "TensorDataset", "batch_size": 8}, False, id="large-rows"),
        pytest.param("row", {"dataset": "TensorDataset", "batch_size": None}, False, id="whole-batches"),
        pytest.param("collate", {"dataset": "Rows", "batch_size": 4096}, False, id="nobody-knows-of-what"),
        pytest.param("loads", {"dataset": "TensorDataset", "batch_size": 4096}, False, id="something-else"),
    ],
)
def test_small_rows_are_told_by_what_fetches_and_joins_them(tmp_path, frame, loader, is_told):
    run = run_record(2, program={"loaders": [LOADER | loader]})
    folder = run_of(tmp_path / "run", slow_loader, run)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (frame, "data", "runs", 9.0))
    (first, *_) = causes(judge(load_run(folder, "run")))
    assert first.kind == "data_loading"
    assert first.change.startswith("make whole batches at once") == is_told


def test_a_data_set_of_the_program_that_only_indexes_has_rows(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("class Rows:\n    def __getitem__(self, i):\n        return self.x[i], self.y[i]\n")
    os.utime(script, (1, 1))
    loader = LOADER | {"dataset": "Rows", "batch_size": 4096}
    run = run_record(2, program={"loaders": [loader]}, command=[str(script)], started_unix_ns=10**18)
    folder = run_of(tmp_path / "run", slow_loader, run)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("collate", "data", "runs", 9.0))
    (first, *_) = causes(judge(load_run(folder, "run")))
    assert "batch_size=None at train.py:41; Rows.__getitem__ takes that list then)" in first.change


def test_workers_are_not_offered_where_no_core_is_free(tmp_path):
    run = msgspec.structs.replace(run_record(2), program={"loaders": [LOADER], "modes": {"num_cores": 2}})
    (first, *_) = causes(judge(load_run(run_of(tmp_path / "run", slow_loader, run), "run")))
    assert first.kind == "data_loading"
    where = "workers (num_workers=0 at train.py:41) would take cores from training, as none of the 2 is free"
    assert first.change.endswith(where)
    assert "set num_workers" not in first.change


def test_workers_are_not_offered_for_batches_that_take_as_long_to_hand_over(tmp_path):
    """0.6 ms of 2: a worker's batch costs the process that trains about as much."""

    def make(rank, step, noise):
        return Host().work(0.6, "data").work(1.2 * noise.gauss(1, 0.01)).comm(0.2)

    run = msgspec.structs.replace(run_record(2), program={"loaders": [LOADER], "modes": {"num_cores": 16}})
    (first, *_) = causes(judge(load_run(run_of(tmp_path / "run", make, run), "run")))
    assert first.change.startswith("make whole batches at once")


def test_gradients_that_the_program_reduces_one_by_one_are_for_buckets(tmp_path):
    """As many small all_reduces as the optimizer has tensors; of values the remedy is another."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01))
        for _ in range(24):
            host.comm(0.5, size=64)
        return host

    assert "DistributedDataParallel(model) instead" in advice(
        tmp_path / "gradients", make, optimizers=ADAM | {"num_parameters": 24}
    )
    assert "only shown" in advice(tmp_path / "values", make, optimizers=ADAM | {"num_parameters": 200})


@pytest.mark.parametrize(("rows", "num", "is_told"), [(32, 1, True), (64, 1, False), (32, 2, False)])
def test_ranks_that_load_what_all_of_them_train_on_are_told_to_load_their_part(tmp_path, rows, num, is_told):
    """Of a batch of 64 samples, on 2 ranks; not where a model takes one in two parts."""
    calls = CallsOfFewRows(num=num, rows=rows, operators=10, parameter_bytes=1, at=None)
    run = run_with(loaders=LOADER | {"batch_size": 64})
    run.work = WorkOfStep(flops=1.0, calls=calls)
    [told, *_] = causes(judge(load_run(run_of(tmp_path / "run", slow_loader, run), "run"), 1))
    assert told.change.startswith("let each rank load its own part: the loader at train.py:41") == is_told


def test_as_many_values_as_a_model_has_tensors_are_no_gradients(tmp_path):
    """24 calls of 64 bytes, which are all that the optimizer updates, or a hundredth."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01))
        for _ in range(24):
            host.comm(0.5, size=64)
        return host

    place = {"file": "/job/train.py", "line": 9, "function": "main", "num_calls": 240, "bytes": 240 * 64}
    sites = CallSites(num_steps=10, sites=[CallSite(**place, op="all_reduce", moves="a tensor")])
    told = []
    for size in (24 * 64, 2400 * 64):
        optimizers = ADAM | {"num_parameters": 24, "parameter_bytes": size}
        judged = judge(
            load_run(run_of(tmp_path / str(size), make, run_with(optimizers=optimizers)), "run"), 1
        )
        told.append(causes(msgspec.structs.replace(judged, sites=lambda rank: sites))[0].change)
    assert ["DistributedDataParallel(model) instead" in text for text in told] == [True, False]


@pytest.mark.parametrize("gathered", [0, 12, 24])
def test_weights_that_ranks_send_each_other_in_every_step_are_left_out(tmp_path, gathered):
    """24 calls of 64 bytes, which are all that the optimizer updates; of a part of it they are needed. Where
    as much goes to one rank before, it may be gradients that come back."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01))
        for _ in range(24):
            host.comm(0.5, "broadcast", size=64)
        return host

    place = {"file": "/job/train.py", "line": 9, "function": "main", "num_calls": 240, "bytes": 240 * 64}
    to_one = place | {"line": 8, "num_calls": 10 * gathered, "bytes": 10 * gathered * 64}
    rows = [CallSite(**place, op="broadcast", moves="a tensor")]
    rows += [CallSite(**to_one, op="gather", moves="a tensor")] if gathered else []
    sites = CallSites(num_steps=10, sites=rows)
    told = []
    for size in (24 * 64, 12 * 64):
        run = run_of(tmp_path / str(size), make, run_with(optimizers=ADAM | {"parameter_bytes": size}))
        judged = judge(load_run(run, "run"), 1)
        told.append(causes(msgspec.structs.replace(judged, sites=lambda rank: sites))[0].change)
    assert ["leave these broadcasts out" in text for text in told] == [gathered < 24, False]
    assert ["in place of one rank that gets" in text for text in told] == [gathered == 24, False]


@pytest.mark.parametrize(
    ("size", "sent_ms", "told"),
    [
        pytest.param(64 * MIB, 12.0, "AdamW in place of ZeroRedundancyOptimizer at train.py:12", id="small"),
        pytest.param(64 * 1024 * MIB, 12.0, "where memory has room for all of its state", id="large"),
        pytest.param(64 * MIB, 1.0, None, id="sent-in-no-time"),
    ],
)
def test_parameters_that_a_sharded_optimizer_sends_are_a_cause_beside_gradients(
    tmp_path, size, sent_ms, told
):
    """Of a step with 6 ms of gradients."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01)).comm(6.0, size=size)
        return host.comm(sent_ms, "broadcast", size=size)

    place = {"file": "/job/train.py", "line": 9, "function": "main", "num_calls": 10, "bytes": 10 * size}
    rows = [CallSite(**place, op="all_reduce", moves="gradients, bucket 0: fc.weight")]
    rows += [CallSite(**place | {"line": 10}, op="broadcast", moves="for optimizer: ZeroRedundancyOptimizer")]
    plain = {"kind": "AdamW", "parameter_bytes": size / 2, "site": "train.py:12"}
    run = run_with(optimizers=plain | {"kind": "ZeroRedundancyOptimizer", "parameter_bytes": size})
    run.program["optimizers"].append(plain)
    run.devices.append({"kind": "cpu", "memory_bytes": 256 << 30})
    judged = judge(load_run(run_of(tmp_path / "run", make, run), "run"), 1)
    judged = msgspec.structs.replace(judged, sites=lambda rank: CallSites(num_steps=10, sites=rows))
    found = [one for one in causes(judged) if "ZeroRedundancyOptimizer" in one.change]
    assert [one.ms for one in found] == ([pytest.approx(sent_ms, rel=0.1)] if told else [])
    assert all(told in one.change for one in found)


def test_calls_of_the_program_are_not_charged_with_another_operation(tmp_path):
    """12 broadcasts of 2 ms by hand beside an all_reduce of 6 ms: at most 24 ms are of broadcast."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01))
        for _ in range(12):
            host.comm(2.0, op="broadcast", size=64)
        return host.comm(6.0, size=8 * MIB)

    explained = found_causes(judge(load_run(run_of(tmp_path / "run", make), "run")))
    assert explained.cannot_tell == []
    (cause,) = [cause for cause in explained.listed if cause.kind == "small_messages"]
    assert 20.0 < cause.ms <= 24.01


@pytest.mark.parametrize(("cores", "is_crowded"), [(2, True), (3, False), (0, False)])
def test_a_process_with_more_threads_than_cores_takes_its_own(cores, is_crowded):
    """Two threads of torch and a loader worker."""
    record = msgspec.structs.replace(
        run_with(loaders=LOADER | {"num_workers": 1}),
        program={"loaders": [LOADER | {"num_workers": 1}], "modes": {"num_threads": 2, "num_cores": cores}},
    )
    names, facts = program_of(record)
    assert ("own_crowd" in names) == is_crowded
    assert ("fewer" in facts) == is_crowded


@pytest.mark.parametrize(
    ("modes", "fewer"),
    [
        pytest.param({}, "OMP_NUM_THREADS=2", id="by-default"),
        pytest.param(
            {"threads_at": ["/job/a.py", 7]},
            "torch.set_num_threads(2) at a.py:7, which goes before OMP_NUM_THREADS",
            id="set-by-the-program",
        ),
        pytest.param({"num_threads": 2}, None, id="as-many-as-cores"),
        pytest.param({"num_local_ranks": 1}, None, id="ranks-on-machines-of-their-own"),
        pytest.param({"shares_cores": False}, None, id="bound-to-cores-of-their-own"),
        # Ranks have two cores, and others the rest.
        pytest.param({"idle_cores": 0.0, "own_cores": 1.2}, "OMP_NUM_THREADS=2", id="they-have-them"),
        pytest.param({"idle_cores": 0.0, "own_cores": 0.5}, None, id="other-programs-have-them"),
        pytest.param(
            {"idle_cores": 0.0, "own_cores": 0.5, "num_threads": 8},
            "OMP_NUM_THREADS=2",
            id="neither-has-room",
        ),
    ],
)
def test_the_ranks_of_a_machine_have_threads_for_its_cores_together(modes, fewer):
    """Two ranks on one machine with 4 cores for both, and 4 threads of torch in each."""
    known = {"num_threads": 4, "num_cores": 4, "shares_cores": True, "num_local_ranks": None}
    record = msgspec.structs.replace(
        run_record(2), program={"modes": known | modes}, environment={"OMP_NUM_THREADS": "1"}
    )
    names, facts = program_of(record)
    assert facts.get("fewer") == fewer
    assert ("own_crowd" in names) == (fewer is not None)
    at = crowded_at(record)
    assert (at and (at.file, at.line)) == (("/job/a.py", 7) if modes.keys() & {"threads_at"} else None)


@pytest.mark.parametrize(("own", "words"), [(1.5, "first of all their own: 2 "), (0.2, "their own, too: 2 ")])
def test_threads_that_have_no_room_alone_are_told_beside_others_that_have_the_cores(own, words):
    modes = {"num_threads": 8, "num_cores": 4, "shares_cores": True, "idle_cores": 0.0, "own_cores": own}
    names, facts = program_of(msgspec.structs.replace(run_record(2), program={"modes": modes}))
    assert "own_crowd" in names
    assert facts["whose"].startswith(words)
    assert facts["whose"].endswith("of which others have most") == (own < 1)


@pytest.mark.parametrize(
    ("threads", "set_at", "is_one"), [(1, ["/job/a.py", 7], True), (1, None, False), (4, ["a.py", 7], False)]
)
def test_a_program_that_sets_torch_to_one_thread_is_told_where(threads, set_at, is_one):
    """Of 8 cores; a launcher's OMP_NUM_THREADS=1 is no line of the program."""
    modes = {"num_threads": threads, "num_cores": 8, "threads_at": set_at}
    names, facts = program_of(msgspec.structs.replace(run_with(), program={"modes": modes}))
    assert ("one_thread" in names) == is_one
    assert facts == ({"whole_cores": "8", "threads_at": "a.py:7"} if is_one else {})


@pytest.mark.parametrize(
    ("threads", "set_at", "set_to", "cores", "is_one"),
    [
        (1, None, "1", 8, True),
        (1, None, None, 8, False),
        (1, ["a.py", 7], "1", 8, False),
        (1, None, "1", 1, False),
    ]
    + [(4, None, "4", 8, False)],
)
@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_one_thread_that_a_launcher_leaves_is_told_where_cores_are_left(
    threads, set_at, set_to, cores, is_one, variable
):
    modes = {"num_threads": threads, "num_cores": cores, "threads_at": set_at}
    environment = {} if set_to is None else {variable: set_to}
    assert threads_variable(run_record(environment={"OMP_NUM_THREADS": "2"} | environment)) == (
        variable if set_to else "OMP_NUM_THREADS"
    )
    record = msgspec.structs.replace(run_with(), program={"modes": modes}, environment=environment)
    names, facts = program_of(record)
    assert ("omp_thread" in names) == is_one
    assert facts.get("omp_enough") == ("8" if is_one else None)

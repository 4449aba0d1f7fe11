"""Every remedy that can be printed has a program that shows what it gives, or a reason why it has none."""

import re
import string
import sys
from pathlib import Path

import pytest

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.why.causes.rules import rules
from tests.dist.launch import run_python
from tests.why.causes.runs import causes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from plants.remedies import PROGRAMS, remedies  # noqa: E402

REMEDIES = remedies()
OF_SERVERS = "of traces of inference: nothing runs here"
NOT_WRITTEN = "nobody has written one yet: tried by hand alone"
WITHOUT_PROGRAM = {
    ("bubble", "more micro-batches"): "needs a pipeline of several stages",
    ("clock", "check cooling"): "a fault of a machine",
    ("compute", "torch.set_num_threads"): "needs cores that nobody else has",
    ("compute", "make {length} a multiple"): "needs GPUs: kernels of a CPU take rows of any length",
    ("compute", "let the module that leaves autocast"): "needs GPUs: a CPU has no tensor cores",
    ("compute", "model.to(memory_format"): "needs convolutions of cuDNN",
    ("compute", "torch.set_float32_matmul_precision"): "changes what training computes",
    ("compute", "torch.no_grad() around"): NOT_WRITTEN,
    ("compute", "choose the positions"): NOT_WRITTEN,
    ("copy", "leave out copies"): "what to change depends on who copies",
    ("copy", "copy with non_blocking=True"): "what `gpu_pageable` is told, of memory that is pinned",
    ("copy", "let what needs these tensors"): "what the host does with them depends on the program",
    ("core_taken", "let each process use more"): "needs cores that nobody else has",
    ("data_loading", "cut batches out"): "`loader_items` goes this far with the same loss",
    ("garbage_collection", "gc.disable()"): "Python collects all by itself only after a quarter more objects",
    ("idle", ""): "of traces without host activities: nothing is set",
    ("imbalance", "give all ranks"): "needs several GPUs: on busy cores ranks wait for other reasons",
    ("imbalance", "a load-balancing loss"): "needs a mixture of experts on several GPUs",
    ("late_rank", "inspect"): "a fault of a machine",
    ("late_rank", "move layers"): "needs a pipeline of several stages",
    ("launch_bound", "larger micro-batches"): "what `gpu_small_kernels` is told where it goes on to be short",
    ("launch_bound", "replay the forward pass"): OF_SERVERS,
    ("launch_bound", "do before or behind"): "on a CPU: `recurrence_by_hand`",
    ("memory", "PYTORCH_CUDA_ALLOC_CONF"): "at the limit of a device: benchmarks/plants/memory.py",
    ("no_prefetch", "FullyShardedDataParallel(sharding"): "of fully_shard: `reshard`",
    ("no_prefetch", "FullyShardedDataParallel(forward"): "needs GPUs: nothing overlaps on a CPU",
    ("no_prefetch", "issue the gather"): "needs GPUs: nothing overlaps on a CPU",
    ("optimizer", "{optimizer} at {optimizer_site} has no fused form"): "another optimizer trains otherwise",
    ("optimizer", "fused=True where"): "of SGD or Adagrad; of Adam: `fused`",
    ("pause", "{do} over more"): "what is learned from cannot be left out, or not without loss",
    ("program_code", "{do} on the device"): "needs GPUs: on a CPU nothing idles meanwhile",
    ("program_code", "{do} in another process"): "what the program itself works on need not be of tensors",
    ("program_code", "leave torch more than one thread"): "needs cores that nobody else has",
    ("program_code", "let {runs} run once"): NOT_WRITTEN,
    ("program_code", "{do} once for all samples"): NOT_WRITTEN,
    ("program_code", "leave torch.profiler out"): "what a profiler takes depends on what it records",
    ("shared_communicator", ""): "needs NCCL, whose calls of a group queue",
    ("small_messages", "flatten the tensors"): "of messages of units, and of those of which no more is known",
    ("small_messages", "join tensors to buckets"): "what `by_hand` is told, of calls that are not waited for",
    ("small_messages", "leave these calls out"): "`by_hand`, of a program that has DDP as well",
    ("small_messages", "{layer} gathers"): "needs GPUs: SyncBatchNorm is not for a CPU",
    ("small_units", "several of them in one unit"): "of FullyShardedDataParallel what `units` is told",
    ("synchronisation", "prepare the next batch"): OF_SERVERS,
    ("transfer", "a one-shot or fused"): OF_SERVERS,
    ("transfer", "async_op=True"): "needs GPUs: nothing overlaps on a CPU",
    ("transfer", "remove the barriers"): "of few of them; the same of many has a program (small_messages)",
    ("transfer", "send tokens"): "needs a mixture of experts",
    ("wide_dtype", "MixedPrecisionPolicy("): "needs GPUs: gloo reduces bfloat16 on the CPU",
}
"""By kind and the beginning of the remedy; '' stands for all of a kind."""


def printed(text, name, who):
    """A remedy as it might be printed of a program."""
    facts = {field: "1" for _, field, *_ in string.Formatter().parse(text) if field}
    facts |= dict.fromkeys(
        ("loader_site", "ddp_site", "optimizer_site", "units_site", "asked_at"), f"{name}.py:7"
    )
    return text.format_map(
        facts
        | {
            "line": f"f(), {name}.py:7",
            "do": f"do what f(), {name}.py:7 does",
            "at_line": f": at f(), {name}.py:7",
            "who": who,
            "repeats": "6",
            "bucket_cap_mb": "0.05",
            "op": "all_reduce",
            "parameter_dtype": "float32",
            "optimizer": "Lion",
        }
    )


def has_program(kind, text):
    return any(
        re.fullmatch(remedy.cause, kind) and re.search(remedy.told, printed(text, name, who))
        for name, remedy in REMEDIES.items()
        for who in ("rank 0", "rank 1")
    )


def test_every_remedy_has_a_program_or_a_reason():
    missing = [
        (kind, change.set)
        for kind, rule in rules().items()
        for change in rule.change
        if not has_program(kind, change.set)
        and not any(kind == of and change.set.startswith(begin) for of, begin in WITHOUT_PROGRAM)
    ]
    assert missing == []


def test_every_reason_is_of_a_remedy_without_a_program():
    without = {
        (kind, change.set)
        for kind, rule in rules().items()
        for change in rule.change
        if not has_program(kind, change.set)
    }
    assert [
        entry
        for entry in WITHOUT_PROGRAM
        if not any(k == entry[0] and t.startswith(entry[1]) for k, t in without)
    ] == []


ATTACHED = """
import runpy, sys, torch
from aorta.attach import hooks
from aorta.attach.settings import AttachSettings
script, folder = sys.argv[1:3]
attachment = hooks.Attachment(AttachSettings(output=folder, overhead="off"))
attachment.imported("torch", torch)
sys.path.insert(0, sys.argv[3])
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["anomaly", "foreach_off"])
def test_a_remedy_is_told_and_not_told_again_once_it_is_in_force(name, tmp_path):
    told = []
    for variant, text in (("planted", REMEDIES[name].text), ("changed", REMEDIES[name].changed())):
        (tmp_path / variant).mkdir()
        script = tmp_path / variant / f"{name}.py"
        script.write_text(text)
        done = run_python(
            "-c",
            ATTACHED,
            script,
            tmp_path / variant / "run",
            PROGRAMS,
            PLANT_STEPS="24",
            OMP_NUM_THREADS="1",
        )
        assert done.returncode == 0, done.stderr
        found = causes(judge(load_run(tmp_path / variant / "run", "run")))
        told.append([cause for cause in found if re.search(REMEDIES[name].told, cause.change)])
    planted, changed = told
    assert [cause.kind for cause in planted] == [REMEDIES[name].cause]
    assert changed == []

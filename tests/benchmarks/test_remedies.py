"""Every remedy that can be printed has a program that shows what it gives, or a reason why it has none."""

import re
import string
import sys
from pathlib import Path

import pytest

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.why.causes.arguments import argument_remedies
from aorta.why.causes.rules import call_remedies, rules
from tests.dist.launch import run_python
from tests.why.causes.runs import causes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from plants.remedies import PROGRAMS, remedies  # noqa: E402

REMEDIES = remedies()
WITHOUT_PROGRAM = {
    ("clock", "check cooling"): "a fault of a machine",
    ("idle", ""): "of traces without host activities: nothing is set",
    ("launch_bound", "torch.compile(model, mode='reduce-overhead'), which replays the forward"): "as of those"
    " that train",
    ("compute", "make lengths of Fourier transforms"): "as of the one that is known",
    ("late_rank", "inspect"): "a fault of a machine",
    ("no_prefetch", "leave CUDA_DEVICE_MAX_CONNECTIONS=1"): "gpu_late_gathers sets it: there it helps",
    ("no_prefetch", "more rows a step give"): "what is left",
    ("transfer", "the plain optimizer in place"): "zero_alone shows it, and is told which",
    ("program_code", "DistributedDataParallel, with a process"): "the changed program has more ranks",
    ("program_code", "torch.cuda.memory._record_memory_history"): "allocations_traced is as that on a CPU",
    ("program_code", "draw as few numbers as are used"): "as few as a program can do with",
    ("program_code", "draw figures in one step"): "as of what is logged",
    ("program_code", "compute metrics in one step"): "as of what is logged, in libraries that are not here",
    ("program_code", "clip once a step"): "a program that clips twice gains half",
    ("program_code", "make lists of the tensors once"): "as of copies",
    ("program_code", "read many rows in one call"): "h5py is not here",
    ("program_code", "ask for all rows of a batch"): "as of frames, in a library that is not here",
    ("program_code", "open files once"): "files of a test are in memory",
    ("program_code", "copy it to a disk"): "no network",
    ("program_code", "unpack the archive"): "as of files",
    ("program_code", "keep what is logged in a list"): "as of what is logged",
    ("program_code", "save less often"): "saving shows it, which torch.save() writes",
    ("program_code", "fit and transform all"): "a library that is not here",
    ("program_code", "keep the place of each entry"): "as of texts",
    ("program_code", "look for it once"): "as of what is sorted",
    ("program_code", "make texts of what a model predicts"): "as of what is logged",
    ("program_code", "leave checks of values out"): "gpu_values_checked shows it, and is told more",
    ("program_code", "ask for all rows of a batch in one call (x["): "as of frames",
    ("program_code", "tokenize all texts once"): "as of texts, in a library that is not here",
    ("program_code", "change whole batches of tensors"): "as of images, in a library that is not here",
    ("program_code", "make transforms once"): "a library that is not here",
    ("program_code", "work on whole arrays with numpy"): "as of values that are read",
    ("program_code", "compute it once for each sample"): "as of texts",
    ("program_code", "put rows of like length"): "padded shows it, and is told more",
    ("program_code", "leave class numbers"): "one_hot_rows shows it, and is told more",
    ("data_loading", "leave num_workers="): "what a device's memory is pinned for",
    ("data_loading", "give what draws nothing at random"): "a library that is not here",
    ("data_loading", "where samples are arrays"): "values_sent shows it in the step",
    ("program_code", "read settings into plain"): "a library that is not here",
    ("program_code", "leave debug="): "as of what watches each module: gpu_hooked",
    ("pause", "leave skip_memory_metrics="): "lock_held shows it: a thread that holds the lock",
    ("synchronisation", "log less often"): "gpu_losses_read shows it, in a loop of the program's own",
    ("program_code", "leave profiler="): "calls_profiled and profiled show it",
    ("program_code", "log less often"): "as of what is logged",
    ("data_loading", "leave reload_dataloaders"): "loader_anew shows it",
    ("compute", "leave bf16="): "a CPU without such instructions",
    ("compute", "leave precision=True out of Trainer(...): at {at}; this"): "a CPU without them",
    ("compute", "leave mixed_precision="): "a CPU without such instructions",
    ("program_code", "leave benchmark="): "gpu_sizes_tried shows it",
    ("optimizer", "optim="): "fused and own_optimizer show it",
    ("memory", "leave torch_empty_cache_steps="): "gpu_cache_emptied shows it",
    ("small_messages", "leave sync_batchnorm="): "statistics shows it",
    ("small_messages", "leave ddp_bucket_cap_mb="): "buckets shows it",
    ("small_messages", "leave bucket_cap_mb="): "buckets shows it",
    ("program_code", "leave comm_hook="): "gradients_widened shows a hook's cost",
    ("pause", "leave the sleep out"): "sleeping shows it, and is told more",
    ("pause", "the thread waits there"): "what other threads do differs from program to program",
}
"""By kind and the beginning of the remedy; '' stands for all of a kind."""


def all_remedies():
    """By kind, and those of calls and arguments by the first that they are told of."""
    of_rules = [(kind, change.set) for kind, rule in rules().items() for change in rule.change]
    of_calls = [((one.kinds or ["program_code"])[0], one.set) for one in call_remedies()]
    of_arguments = [
        (
            one.kinds[0],
            one.set.replace("{written}", f"{one.arguments[0]}=True").replace("{call}", call_of(one)),
        )
        for one in argument_remedies()
    ]
    return [entry for entry in of_rules if "{instead}" not in entry[1]] + of_calls + of_arguments


def call_of(remedy):
    return f"{remedy.of[0].rpartition('.')[2].lstrip('*')}(...)"


def printed(text, name, who):
    """A remedy as it might be printed of a program."""
    facts = {field: "1" for _, field, *_ in string.Formatter().parse(text) if field}
    facts |= dict.fromkeys(
        ("loader_site", "ddp_site", "optimizer_site", "units_site", "asked_at", "threads_at", "apart_at"),
        f"{name}.py:7",
    )
    return text.format_map(
        facts
        | {
            "line": f"f(), {name}.py:7",
            "at": f"f(), {name}.py:7",
            "do": f"do what f(), {name}.py:7 does",
            "at_line": f": at f(), {name}.py:7",
            "at_optimizer": f" at {name}.py:7",
            "who": who,
            "buffers_option": "broadcast_buffers",
            "repeats": "6",
            "bucket_cap_mb": "0.05",
            "op": "all_reduce",
            "parameter_dtype": "float32",
            "optimizer": "Lion",
            "threads_variable": "OMP_NUM_THREADS",
            "move": f"move work out of __getitem__ and collate_fn: at f(), {name}.py:7",
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
        (kind, text)
        for kind, text in all_remedies()
        if not has_program(kind, text)
        and not any(kind == of and text.startswith(begin) for of, begin in WITHOUT_PROGRAM)
    ]
    assert missing == []


def test_every_reason_is_of_a_remedy_without_a_program():
    without = {(kind, text) for kind, text in all_remedies() if not has_program(kind, text)}
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


def causes_of(script, folder):
    """Causes of a run of a remedy's program."""
    steps = {"PLANT_STEPS": "240", "OMP_NUM_THREADS": "1"}
    done = run_python("-c", ATTACHED, script, folder, PROGRAMS, **steps)
    assert done.returncode == 0, done.stderr
    return causes(judge(load_run(folder, "run")))


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["anomaly", "foreach_off"])
def test_a_remedy_is_told_and_not_told_again_once_it_is_in_force(name, tmp_path):
    """Told in one of three runs: where others take the cores, a run's samples may show nothing else."""
    remedy, seen = REMEDIES[name], []
    for variant, text in (("planted", remedy.text), ("changed", remedy.changed())):
        (tmp_path / variant).mkdir()
        script = tmp_path / variant / f"{name}.py"
        script.write_text(text)
        for attempt in range(3):
            found = causes_of(script, tmp_path / variant / f"run{attempt}")
            told = [cause.kind for cause in found if re.search(remedy.told, cause.change)]
            seen.append((variant, [(cause.kind, cause.change) for cause in found]))
            if told or variant == "changed":
                break
        assert told == ([remedy.cause] if variant == "planted" else []), seen

"""Stacks written beside a run made by hand."""

import msgspec

from aorta.records.files import stacks_name
from aorta.records.stacks import DOING, PLACES, STACK_PHASES, StackChunk, StackFrame, StackSample
from tests.why.causes.runs import STEPS

TRAIN = "/job/train.py"
FRAMES = {
    "main": StackFrame(TRAIN, 20, "main", is_program=True),
    "augment": StackFrame("/job/straggler.py", 5, "augment", is_program=True),
    "backward": StackFrame("torch", 0, "Tensor.backward", is_program=False),
    "synchronize": StackFrame("torch", 0, "synchronize", is_program=False),
    "empty_cache": StackFrame("torch", 0, "empty_cache", is_program=False),
    "zero_grad": StackFrame("torch", 0, "Optimizer.zero_grad", is_program=False),
    "checkcache": StackFrame("python", 0, "checkcache", is_program=False),
    "loads": StackFrame("python", 0, "loads", is_program=False),
    "norm": StackFrame("torch", 0, "SyncBatchNorm.forward", is_program=False),
    "getitem": StackFrame("/job/data.py", 7, "Rows.__getitem__", is_program=True),
    "tensor": StackFrame("", 0, "torch.tensor", is_program=False),
    "item": StackFrame("", 0, "item", is_program=False),
    "mean": StackFrame("", 0, "Tensor.mean", is_program=False),
    "model": StackFrame(TRAIN, 40, "Net.forward", is_program=True),
    "hook": StackFrame(TRAIN, 33, "main", is_program=True),
    "reading": StackFrame("/job/straggler.py", 9, "augment", is_program=True),
    "own_hook": StackFrame(TRAIN, 33, "keep", is_program=True),
    "row": StackFrame("torch", 0, "TensorDataset.__getitem__", is_program=False),
    "collate": StackFrame("torch", 0, "collate", is_program=False),
    "epoch": StackFrame("transformers", 0, "Trainer._run_epoch", is_program=False),
    "log": StackFrame("lightning", 0, "LightningModule.log_dict", is_program=False),
    "gather": StackFrame("accelerate", 0, "Accelerator.gather", is_program=False),
    "of_log": StackFrame("torch", 0, "barrier", is_program=False),
    "of_gather": StackFrame("torch", 0, "barrier", is_program=False),
    "waiting": StackFrame("accelerate", 0, "Accelerator.wait_for_everyone", is_program=False),
    "of_waiting": StackFrame("torch", 0, "barrier", is_program=False),
    "update": StackFrame("torchmetrics", 0, "MeanMetric.update", is_program=False),
    "of_hook": StackFrame("torch", 0, "powerSGD_hook", is_program=False),
    "compress": StackFrame(TRAIN, 50, "compress", is_program=True),
    "fit": StackFrame("lightning", 0, "Trainer.fit", is_program=False),
    "watch": StackFrame(TRAIN, 60, "Net.on_before_optimizer_step", is_program=True),
    "own_step": StackFrame(TRAIN, 70, "Lion.step", is_program=True),
    "training": StackFrame(TRAIN, 80, "Net.training_step", is_program=True),
    "packs": StackFrame("torch", 0, "save_on_cpu.__init__.<locals>.pack_to_cpu", is_program=False),
    "of_training": StackFrame("", 0, "Tensor.mean", is_program=False),
    "parallel": StackFrame("torch", 0, "Module._wrapped_call_impl", is_program=False),
    "scatter": StackFrame("torch", 0, "scatter", is_program=False),
    "per_step": StackFrame(TRAIN, 38, "shared_error", is_program=True),
    "outputs": StackFrame(TRAIN, 90, "keep_outputs", is_program=True),
    "of_outputs": StackFrame("", 0, "Tensor.abs", is_program=False),
    "own_forward": StackFrame(TRAIN, 95, "Net.forward", is_program=True),
    "timed": StackFrame(TRAIN, 92, "timed.<locals>.call", is_program=True),
    "of_timed": StackFrame(TRAIN, 95, "Net.forward", is_program=True),
    "compiles": StackFrame("torch", 0, "_compile", is_program=False),
    "group": StackFrame("torch", 0, "_new_process_group_helper", is_program=False),
    "replicate": StackFrame("torch", 0, "replicate", is_program=False),
    "thread": StackFrame("python", 0, "Thread._bootstrap", is_program=False),
    "rebuilt": StackFrame("torch", 0, "rebuild_storage_fd", is_program=False),
    "receive": StackFrame("python", 0, "Connection._recv", is_program=False),
    "task": StackFrame("/job/batches.py", 12, "prepare", is_program=True),
    "parse": StackFrame("/job/text.py", 30, "parse", is_program=True),
    "other_task": StackFrame("/job/logs.py", 4, "send", is_program=True),
    "attends": StackFrame("transformers", 0, "sdpa_attention_forward", is_program=False),
    "distribution": StackFrame("torch", 0, "Distribution.__init__", is_program=False),
    "draws": StackFrame("torch", 0, "Normal.sample", is_program=False),
    "sends": StackFrame("lightning", 0, "move_data_to_device.<locals>.batch_to", is_program=False),
    "kept": StackFrame("python", 0, "FrameSummary.__init__", is_program=False),
    "sent": StackFrame("", 0, "Tensor.to", is_program=False),
    "sends_buffers": StackFrame(
        "torch", 0, "DistributedDataParallel._distributed_broadcast_coalesced", is_program=False
    ),
    "of_fit": StackFrame("torch", 0, "Tensor.backward", is_program=False),
    "later": StackFrame(TRAIN, 24, "main", is_program=True),
    "of_later": StackFrame("", 0, "torch.tensor", is_program=False),
    "draws_one": StackFrame(TRAIN, 16, "main", is_program=True),
    "adds_one": StackFrame(TRAIN, 17, "main", is_program=True),
    "stacks_all": StackFrame(TRAIN, 18, "main", is_program=True),
    "of_draws_one": StackFrame("", 0, "torch.tensor", is_program=False),
    "of_adds_one": StackFrame("", 0, "torch.tensor", is_program=False),
    "prepares": StackFrame("/job/straggler.py", 11, "prepare", is_program=True),
    "evaluates": StackFrame("/job/straggler.py", 15, "Trainer.test_accuracy", is_program=True),
    "of_stacks_all": StackFrame("numpy", 0, "stack", is_program=False),
}
NAMES = [*FRAMES]
CALLERS = {
    "thread": "",
    "hook": "backward",
    "of_log": "log",
    "of_gather": "gather",
    "of_waiting": "waiting",
    "update": "augment",
    "distribution": "augment",
    "draws": "augment",
    "of_hook": "backward",
    "compress": "backward",
    "watch": "fit",
    "own_step": "fit",
    "training": "fit",
    "kept": "fit",
    "of_fit": "fit",
    "packs": "model",
    "of_training": "training",
    "attends": "model",
    "per_step": "augment",
    "group": "per_step",
    "item": "augment",
    "sent": "augment",
    "replicate": "parallel",
    "scatter": "parallel",
    "outputs": "parallel",
    "of_outputs": "outputs",
    "own_forward": "parallel",
    "timed": "parallel",
    "of_timed": "timed",
    "receive": "thread",
    "task": "thread",
    "parse": "task",
    "other_task": "thread",
    "later": "",
    "of_later": "later",
    "draws_one": "",
    "adds_one": "",
    "stacks_all": "",
    "of_draws_one": "draws_one",
    "of_adds_one": "adds_one",
    "prepares": "draws_one",
    "of_stacks_all": "stacks_all",
}
"""Of the others main; '' of the outermost function of a thread."""


def _parent(name):
    caller = CALLERS.get(name, "main")
    return NAMES.index(caller) if caller else -1


def write_stacks(folder, rank, *samples, steps=STEPS, behind=()):
    """samples: (frame below its caller, phase, doing, ms) of every step, or with N behind it of one in N.
    behind: frames that are seen behind the step's body."""
    chunk = StackChunk(
        begins=True,
        frames=[*FRAMES.values()],
        nodes=[
            (-1, 0),
            *((_parent(name), frame) for frame, name in enumerate(NAMES) if frame),
        ],
        samples=[
            StackSample(
                step,
                PLACES.index("behind_body" if name in behind else "body"),
                STACK_PHASES.index(phase),
                DOING.index(doing),
                False,
                NAMES.index(name),
                int(ms * 1e3),
            )
            for step in range(steps)
            for name, phase, doing, ms, *every in samples
            if step % (every or [1])[0] == 0
        ],
    )
    (folder / stacks_name(rank)).write_bytes(msgspec.json.encode(chunk) + b"\n")


COMMON = ("backward", "backward", "runs", 30.0)

"""Judged runs in memory with sampled stacks beside their steps."""

import msgspec

from aorta.records.stacks import DOING, PLACES, STACK_PHASES, StackFrame, Stacks, StackSample
from tests.account.reports_in_memory import dataset_of, records_of

MAIN = StackFrame("/job/train.py", 20, "main", is_program=True)
BACKWARD = StackFrame("torch", 0, "Tensor.backward", is_program=False)
ENGINE = StackFrame("torch", 0, "_engine_run_backward", is_program=False)
TRAINER = StackFrame("transformers", 0, "Trainer.train", is_program=False)
AUGMENT = StackFrame("/job/data.py", 5, "augment", is_program=True)
MODEL = StackFrame("torch", 0, "Module._call_impl", is_program=False)
SLEEP = StackFrame("time", 0, "sleep", is_program=False)


def sampled(*samples):
    """samples: (global step, us, what the thread does, frames from the outermost on). Step -1: in none, where
    a model is called in an evaluation. ENGINE's are of a backward pass."""
    stacks = Stacks()
    ids = {}
    for step, us, doing, *path in samples:
        node = -1
        for frame in path:
            if frame not in stacks.frames:
                stacks.frames.append(frame)
            key = (node, stacks.frames.index(frame))
            if key not in ids:
                ids[key] = len(stacks.nodes)
                stacks.nodes.append(key)
            node = ids[key]
        phase = "rest" if MODEL not in path else "evaluation" if step < 0 else "forward"
        phase = "backward" if ENGINE in path else phase
        places = (
            PLACES.index("no_step" if step < 0 else "body"),
            STACK_PHASES.index(phase),
            DOING.index(doing),
        )
        stacks.samples.append(StackSample(step, *places, False, node, us))
    return stacks


def sampled_dataset(by_rank, label="run", num_warmup=2, **options):
    """by_rank: stacks of each rank."""
    records = records_of(num_ranks=len(by_rank), **options)
    made = dataset_of(label, records, num_warmup=num_warmup)
    run = msgspec.structs.replace(made.first, stacks=lambda rank: by_rank[rank])
    return msgspec.structs.replace(made, runs=[run])

"""Would learned collectives have been those that happened? Recorded runs tell, by steps held back.

    python benchmarks/learned_calls.py FOLDER... --output learned_calls.csv      # a CPU, a minute

The recorded steps of each rank below the folders, whose collectives were seen one by one, are given to the
learner in order. As soon as it is sure, the next ones are held back: it is told the number of collectives by
group, as backends count them, and nothing else. Columns: steps that it had to see; of those held back, steps
with all operations, groups, sizes, types in order (right), steps that it did not know (unknown), and steps
told wrong: with other operations, which kernels would refute, or with other sizes alone. Only ranks with 14
steps or more of kernel records.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from harness import arguments, write

from aorta.errors import AortaError
from aorta.record.learned_calls import Learner
from aorta.records.reader import read_steps
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.steps.notes import CollectiveCall, Group, RecordedStep

LEAST_STEPS = 14


def told(lines: list[StepRecord]) -> Counter[str]:
    """Numbers of steps by how they were told, of one rank."""
    names = {call.group for line in lines for call in line.collectives or ()}
    counts = dict.fromkeys(sorted(names), 0)
    groups = {name: Group(name, name, [0, 1], "nccl") for name in names}
    learner = Learner(lambda: dict(counts), lambda counts: dict(counts))
    result: Counter[str] = Counter()
    for line in lines:
        step = RecordedStep(line.global_step, line.step, 0, None)
        step.by_kernels, step.is_unseen = True, learner.is_sure
        learner.begin(step, dict(counts))
        happened = [_call(call, groups[call.group]) for call in line.collectives or ()]
        for call in happened:
            counts[call.group.key] += 1
        if not step.is_unseen:
            step.calls = happened
        learner.end(step, dict(counts))
        result[_how(step, happened)] += 1
    return result


def _call(call: CollectiveRecord, group: Group) -> CollectiveCall:
    return CollectiveCall(group, call.op, call.bytes or 0, call.dtype, call.is_async, stream=call.stream)


def _how(step: RecordedStep, happened: list[CollectiveCall]) -> str:
    if not step.is_unseen:
        return "seen"
    if step.learned is None:
        return "unknown"
    calls = step.learned.calls
    if [call.op for call in calls] != [call.op for call in happened]:
        return "other_operations"
    both = [[(c.group.key, c.bytes, c.dtype, c.is_async) for c in of] for of in (calls, happened)]
    return "right" if both[0] == both[1] else "other_sizes"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args()
    total: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for path in sorted(path for folder in options.folders for path in folder.rglob("rank_*_metrics.jsonl")):
        try:
            lines = [line for line in read_steps(path, []) if _is_seen(line)]
        except AortaError:
            continue
        if len(lines) >= LEAST_STEPS:
            found = told(lines)
            total += found
            total["ranks"] += 1
            total["with_collectives"] += any(line.collectives for line in lines)
    names = ("ranks", "with_collectives", "seen", "right", "unknown", "other_operations", "other_sizes")
    rows.append({name: total[name] for name in names})
    print("  ".join(f"{name} {total[name]}" for name in names))
    write(options.output, rows)


def _is_seen(line: StepRecord) -> bool:
    return line.source == "kernels" and line.collectives is not None and not line.calls_learned


if __name__ == "__main__":
    main()

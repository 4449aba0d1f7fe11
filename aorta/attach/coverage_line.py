"""How complete the records of a run are, in lines that a person reads."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from aorta.records.files import steps_name
from aorta.records.schema import RunRecord


class StepNumber(msgspec.Struct):
    """The part of a line that is counted: a step may have lines of several sources."""

    global_step: int


def recorded_steps(folder: Path) -> set[int]:
    """Numbers of the steps that rank 0 recorded."""
    decoder = msgspec.json.Decoder(StepNumber)
    with open(folder / steps_name(0), "rb") as lines:
        return {decoder.decode(line).global_step for line in lines}


def coverage_lines(run: RunRecord, folder: Path) -> Iterator[str]:
    """One line when all is covered; more where something is missing, with what to do."""
    coverage = run.coverage
    num_steps = len(recorded_steps(folder))
    groups = coverage.get("groups") or {}
    counted = sum(group["backend"] for group in groups.values())
    num_seen = sum(group["seen"] for group in groups.values())
    outside = sum((coverage.get("outside_step") or {}).values())
    place_text = f", steps at {coverage['steps_at']}" if "steps_at" in coverage else ""
    counts_text = f"{num_seen} of {counted} collectives seen" if groups else "no process group"
    yield (
        f"aorta: rank 0: {num_steps} steps recorded{place_text}; {counts_text},"
        f" {outside} of them outside of steps"
    )
    for name, group in groups.items():
        if group["backend"] > group["seen"]:
            yield (
                f"aorta: group {name}: {group['backend'] - group['seen']} collectives were called on the "
                "backend itself and not seen"
            )
    if num_steps == 0:
        yield (
            "aorta: no step was found: name the function whose calls are the steps with "
            "--step-at module:function"
        )

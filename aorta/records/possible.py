"""Values that no run writes, of one record and of a block of them."""

from aorta.records.columns.number_block import NumberBlock
from aorta.records.schema import StepRecord

LIMIT = 2**53
"""Above every count and every ms of a run, and exact as a float."""
NOT_NEGATIVE = (
    "step_ms", "between_steps_ms", "host_ms", "tokens", "epoch", "step", "attempt", "rollbacks"
)  # fmt: skip


def fault_of(record: StepRecord) -> str | None:
    """What no run writes and arrays could not hold; None of a record that a run may write."""
    if not 0 <= record.rank < record.world_size < LIMIT:
        return f"rank {record.rank} of {record.world_size}"
    if not 0 <= record.global_step < LIMIT:
        return f"global_step {record.global_step}"
    if not 0 <= record.num_collectives < LIMIT:
        return f"num_collectives {record.num_collectives}"
    for name in NOT_NEGATIVE:
        value = getattr(record, name)
        if value is not None and (value < 0 or name == "step_ms" and not value < LIMIT):
            return f"{name} {value}"
    return None


def are_possible(block: NumberBlock) -> bool:
    """Returns True where no record of the block, all of one rank and world size, has a fault."""
    for name in ("global_step", "num_collectives"):
        counts = block.integers(name)
        if counts.min() < 0 or counts.max() >= LIMIT:
            return False
    if not 0 <= block.first.rank < block.integers("world_size")[0] < LIMIT:
        return False
    for name in NOT_NEGATIVE:
        values = block.numbers(name)
        if values is not None and ((values < 0).any() or (name == "step_ms" and (values >= LIMIT).any())):
            return False
    return True

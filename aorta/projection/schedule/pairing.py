"""The forward pass of one micro-batch beside the backward pass of another, layer by layer, so that the tokens
of each travel to and from the experts while the other computes.

Order on the streams, one layer of each pass:

    all-to-all   combine'            dispatch, dispatch'            combine
    compute      attention           experts', experts              attention'

(' marks the backward pass). Source of the order: Megatron Core, combined 1F1B schedule (2025).
"""

from collections.abc import Sequence

from aorta.projection.job.plan import Plan
from aorta.projection.pricing import Priced, Pricer
from aorta.projection.schedule.issue import STREAMS, Lanes
from aorta.projection.schedule.stage import Unit
from aorta.projection.work.lanes import StreamRun, merged, run
from aorta.projection.work.ops import CollectiveOp

Parts = tuple[Sequence[Priced], Priced, Sequence[Priced], Priced, Sequence[Priced]]


def paired_run(unit: Unit, plan: Plan, pricer: Pricer) -> StreamRun | None:
    """One layer of both passes side by side; None for a layer without an exchange of tokens.

    What a further layer adds to a chain of them, so that the ends of the chain do not count.
    """
    forward, backward = _parts(unit.forward), _parts(unit.backward)
    if forward is None or backward is None:
        return None
    two, three = (_chain(forward, backward, plan, pricer, count) for count in (2, 3))
    return StreamRun(
        [0.0],
        [three.total_s - two.total_s],
        _difference(three.compute_s, two.compute_s),
        three.slowed_s - two.slowed_s,
        _difference(three.stalled_s, two.stalled_s),
    )


def _parts(ops: Sequence[Priced]) -> Parts | None:
    """Operations before, between and after the two exchanges of a pass; None without exchanges."""
    exchanges = [
        number for number, (op, *_) in enumerate(ops) if isinstance(op, CollectiveOp) and op.axis == "ep"
    ]
    if len(exchanges) != 2:
        return None
    first, second = exchanges
    return ops[:first], ops[first], ops[first + 1 : second], ops[second], ops[second + 1 :]


def _chain(forward: Parts, backward: Parts, plan: Plan, pricer: Pricer, count: int) -> StreamRun:
    lanes = Lanes()
    attention, dispatch, experts, combine, epilogue = forward
    before_grad, combine_grad, experts_grad, dispatch_grad, attention_grad = backward

    def compute(ops: Sequence[Priced], needs: int | None = None) -> tuple[int, ...]:
        lanes.flush()
        if needs is not None:
            lanes.need(needs)
        lanes.add(ops, plan)
        return lanes.flush()

    def send(priced: Priced, ready: tuple[int, ...]) -> int:
        op = priced.op
        assert isinstance(op, CollectiveOp)
        return lanes.communicate(
            STREAMS["ep"],
            op.name,
            priced.category,
            op.op,
            priced.seconds,
            ready,
            op.size_bytes,
            priced.link_share,
        )

    combined: int | None = None
    for _ in range(count):
        grads_out = send(combine_grad, compute(before_grad))
        if combined is not None:
            compute(epilogue, combined)
        tokens_out = send(dispatch, compute(attention))
        grads_back = send(dispatch_grad, compute(experts_grad, grads_out))
        combined = send(combine, compute(experts, tokens_out))
        compute(attention_grad, grads_back)
    compute(epilogue, combined)
    return run(lanes.tasks, pricer.contention)


def _difference(larger: dict[str, float], smaller: dict[str, float]) -> dict[str, float]:
    return merged(larger, {category: -seconds for category, seconds in smaller.items()})

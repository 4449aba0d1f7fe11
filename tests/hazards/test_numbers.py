"""Fingerprints of ranks against each other, with numbers by hand."""

import pytest

from aorta.hazards.numbers import Call, Numbered, Parameter, differences


def call(inputs, outputs, step=0, op="all_reduce", reduction="sum", place=0, **given):
    """A call of ranks 0 and 1; fingerprints are [square of the norm, one signed sum]."""
    return Call(
        step=step, group="0,1", number=0, place=place, op=op, reduction=reduction, name="at train.py:8",
        inputs=[[x * x, x] for x in inputs], outputs=[[x * x, x] for x in outputs], **given,
    )  # fmt: skip


def found(*ranks):
    numbered = [Numbered(rank=rank, calls=calls) for rank, calls in enumerate(ranks)]
    return [(d.rank, d.step, d.what) for d in differences(numbered)]


@pytest.mark.parametrize(
    ("op", "reduction", "first", "second"),
    [
        pytest.param("all_reduce", "sum", ([3], [8]), ([5], [8]), id="sum"),
        pytest.param("all_reduce", "avg", ([3], [4]), ([5], [4]), id="average"),
        pytest.param("reduce_scatter", "sum", ([1, 2], [11]), ([10, 20], [22]), id="parts-of-a-sum"),
        pytest.param("all_gather", "", ([3], [3, 5]), ([5], [3, 5]), id="gather"),
        pytest.param("all_reduce", "sum", ([3], []), ([5], [8]), id="nobody-waited-on-one-rank"),
    ],
)
def test_a_collective_computes_what_its_name_says(op, reduction, first, second):
    ranks = [[call(*sides, op=op, reduction=reduction)] for sides in (first, second)]
    assert found(*ranks) == []
    wrong = call(second[0], [2 * x for x in second[1]], op=op, reduction=reduction)
    assert found(ranks[0], [wrong]) == [(1, 0, "sum")]


def test_a_broadcast_brings_the_roots_tensor():
    root, other = call([3], [3], op="broadcast", root=0), call([7], [3], op="broadcast", root=0)
    assert found([root], [other]) == []
    assert found([root], [call([7], [7], op="broadcast", root=0)]) == [(1, 0, "sum")]


def test_an_operation_whose_arithmetic_is_not_known_is_not_judged():
    assert found([call([3], [5], reduction="max")], [call([5], [5], reduction="max")]) == []


def test_rounding_of_a_coarse_type_is_no_difference():
    coarse = [call([3], [8.02], epsilon=2**-8)], [call([5], [8.02], epsilon=2**-8)]
    assert found(*coarse) == []


def test_the_same_input_as_in_the_step_before_is_stale_where_the_others_changed():
    first = [call([3], [8]), call([4], [9], step=1), call([5], [11], step=2)]
    second = [call([5], [8]), call([5], [9], step=1), call([6], [11], step=2)]
    assert found(first, second) == [(1, 1, "stale")]
    assert found(first[:2], second[:2]) == []  # it never changes
    assert {what for _, _, what in found(second, second)} == {"sum"}
    gathered = [[call([x], [3, 5], step=n, op="all_gather", reduction="") for n, x in enumerate(xs)]
                for xs in ((3, 4, 5), (5, 5, 6))]  # fmt: skip
    assert {what for _, _, what in found(*gathered)} == {"sum"}


def test_what_is_not_finite_is_told_where_it_goes_in_first():
    bad = call([1], [1], place=3)
    bad.inputs = [[]]
    later = Parameter(step=0, place=5, name="first.weight", moment="gradient", numbers=[])
    (difference,) = differences([Numbered(rank=0, calls=[bad], parameters=[later])])
    assert (difference.what, difference.name) == ("nan", "all_reduce at train.py:8")


def parameter(value, step, moment="before", name="second.weight", place=0):
    return Parameter(step=step, place=place, name=name, moment=moment, numbers=[value * value, value])


def of_parameters(*ranks, gradients=(4.0, 4.0, 4.0)):
    """Differences of parameters on ranks with these gradients in step 0."""
    numbered = [
        Numbered(rank=rank, parameters=[parameter(gradient, 0, "gradient"), *parameters])
        for rank, (parameters, gradient) in enumerate(zip(ranks, gradients, strict=False))
    ]
    return [(d.rank, d.step, d.what, d.name) for d in differences(numbered)]


def test_the_rank_with_other_weights_than_most_is_named():
    same = [parameter(1.0, 0), parameter(2.0, 1)]
    odd = [parameter(1.0, 0), parameter(2.5, 1)]
    assert of_parameters(same, odd, same) == [(1, 1, "ranks", "second.weight")]


def test_of_two_ranks_the_one_is_named_whose_weights_changed_between_updates():
    still = [parameter(1.0, 0, "after"), parameter(1.0, 1), parameter(1.0, 0)]
    moved = [parameter(1.0, 0, "after"), parameter(1.5, 1), parameter(1.0, 0)]
    assert of_parameters(moved, still) == [(0, 1, "ranks", "second.weight")]
    assert of_parameters(still, moved) == [(1, 1, "ranks", "second.weight")]


@pytest.mark.parametrize("gradients", [(4.0, 5.0), (0.0, 0.0)])
def test_parameters_whose_gradients_ranks_never_had_in_common_are_their_own(gradients):
    """Two stages of a pipeline begin alike, with the same names."""
    one, other = [parameter(1.0, 0), parameter(2.0, 1)], [parameter(1.0, 0), parameter(7.0, 1)]
    assert of_parameters(one, other, gradients=gradients) == []

"""Which calls make one iteration: sequences of calls as loops make them."""

import pytest

from aorta.attach.steps import BackwardCycle, OptimizerCycle


def iterations(calls: str) -> list[int]:
    """After how many calls iterations end. Letter: an optimizer's call; small: behind no backward pass."""
    cycle = OptimizerCycle()
    ends: list[int] = []
    for number, letter in enumerate(calls, start=1):
        ended = cycle.ended(letter.upper(), letter.isupper())
        if ended.at_previous_call:
            ends.append(number - 1)
        if ended.at_this_call:
            ends.append(number)
    return ends


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        pytest.param("AAAA", [1, 2, 3, 4], id="one-optimizer"),
        pytest.param("DGDGDG", [2, 4, 6], id="two-optimizers-each-behind-a-backward"),
        pytest.param("AbAbAb", [2, 4, 6], id="two-optimizers-behind-one-backward"),
        pytest.param("AaaAaaAaa", [3, 6, 9], id="parts-of-one-optimizer"),
        pytest.param("aaaa", [1, 2, 3, 4], id="gradients-without-autograd"),
        pytest.param("DGDGDDG", [2, 4, 5, 7], id="the-second-left-out-once"),
        pytest.param("AAABBB", [1, 2, 3, 4, 5, 6], id="another-optimizer-from-the-fourth-on"),
        pytest.param("DDDGDDDGDDDG", [1, 2, 3, 7, 11], id="several-of-one-before-the-other"),
        pytest.param("A", [], id="one-call-is-no-pattern"),
    ],
)
def test_iterations_end_where_the_first_call_comes_again(calls: str, ends: list[int]) -> None:
    assert iterations(calls) == ends


def passes(signatures: str) -> list[int]:
    """After how many backward passes iterations end. A digit: collectives since the pass before."""
    cycle = BackwardCycle()
    ended = [cycle.ended(["all_reduce"] * int(digit)) for digit in signatures]
    return [number for number, end in enumerate(ended, start=1) if end]


@pytest.mark.parametrize(
    ("signatures", "ends"),
    [
        pytest.param("22222", [3, 4, 5], id="every-pass"),
        pytest.param("0", [], id="too-few"),
        pytest.param("00400400400400", [9, 12], id="accumulation-communicates-in-the-last-pass"),
        pytest.param("40040040040040", [10, 13], id="begins-within-an-iteration"),
        pytest.param("12345678901234", [], id="no-pattern"),
    ],
)
def test_passes_of_accumulation_are_told_from_the_last(signatures: str, ends: list[int]) -> None:
    assert passes(signatures) == ends

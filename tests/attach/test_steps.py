"""Which calls make one iteration: sequences of calls as loops make them."""

import pytest

from aorta.attach.step_detection import MAX_PASSES, BackwardCycle, Ends, OptimizerCycle


def iterations(calls: str, optimizers: str = "") -> list[int]:
    """After how many calls iterations end. Letter: an optimizer's call; small: behind no backward pass.

    optimizers: those that the program has made, called or not.
    """
    cycle = OptimizerCycle()
    ends: list[int] = []
    for number, letter in enumerate(calls, start=1):
        num_uncalled = len(set(optimizers) - set(calls[:number].upper()))
        ended = cycle.ended(letter.upper(), letter.isupper(), num_uncalled)
        ends += [number - ago for ago in ended.earlier]
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
        pytest.param("DDDGDDDGDDDG", [1, 2, 3, 4, 8, 12], id="several-of-one-before-the-other"),
        pytest.param("A" * 70 + "B" + "A" * 80, [*range(1, 71), *range(136, 152)], id="a-stranger-late"),
        pytest.param("AAAABABAB", [1, 2, 3, 4, 5, 7, 9], id="the-second-joins-later"),
        pytest.param("AAA" + "B" + 80 * "A", [1, 2, 3, 4, 7, 10, *range(13, 85)], id="a-stranger-once"),
        pytest.param("A" + "a" * 11, list(range(1, 13)), id="a-captured-backward-is-replayed"),
        pytest.param("Db" + "db" * 5, [2, 4, 6, 8, 10, 12], id="two-optimizers-and-replayed-graphs"),
        pytest.param("Abcl" + "Cbal" * 3, [4, 8, 12, 16], id="the-first-pass-in-another-order"),
        pytest.param("GDDDGDDDGD", [4, 8], id="a-first-one-that-comes-again-is-waited-for"),
        pytest.param("A", [], id="one-call-is-no-pattern"),
    ],
)
def test_iterations_end_where_the_first_call_comes_again(calls: str, ends: list[int]) -> None:
    assert iterations(calls) == ends


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        pytest.param("DDDGDDDGDDDG", [4, 8, 12], id="several-of-one-before-the-other"),
        pytest.param("DDDDDDDDDDGDDDDDDDDDDG", [*range(1, 11), 11, 22], id="the-other-comes-late"),
        pytest.param("DDDDDDDDDD", list(range(1, 11)), id="the-other-never-comes"),
        pytest.param("IIIIoIIIIo", [1, 2, 3, 4, 6, 7, 8, 9], id="an-outer-one-behind-no-backward"),
        pytest.param("DDDDDDGGGG", list(range(1, 11)), id="one-phase-after-the-other"),
        pytest.param("GDGDGD", [2, 4, 6], id="in-turn"),
    ],
)
def test_an_iteration_calls_every_optimizer_of_the_program(calls: str, ends: list[int]) -> None:
    assert iterations(calls, optimizers="IO" if "I" in calls else "DG") == ends


def passes(signatures: str, is_patient: bool = False) -> list[int]:
    """After how many backward passes iterations end. A digit: collectives since the pass before."""
    cycle = BackwardCycle()
    ends: list[int] = []
    for number, digit in enumerate(signatures, start=1):
        ended = cycle.ended(["all_reduce"] * int(digit), is_patient)
        ends += [number - ago for ago in ended.earlier]
        if ended.at_this_call:
            ends.append(number)
    return ends


@pytest.mark.parametrize(
    ("signatures", "ends"),
    [
        pytest.param("222222222", [1, 2, 3, 4, 5, 6, 7, 8, 9], id="every-pass"),
        pytest.param("522222222", [1, 2, 3, 4, 5, 6, 7, 8, 9], id="set-up-before-the-first"),
        pytest.param("022222222", [1, 2, 3, 4, 5, 6, 7, 8, 9], id="collectives-behind-each-pass"),
        pytest.param("2222222", [], id="too-few"),
        pytest.param("00400400400400", [3, 6, 9, 12], id="accumulation-communicates-in-the-last-pass"),
        pytest.param("40040040040040", [1, 4, 7, 10, 13], id="begins-within-an-iteration"),
        pytest.param("31222222222", [3, 4, 5, 6, 7, 8, 9, 10, 11], id="another-phase-before"),
        pytest.param("12345678901234", [], id="no-pattern"),
    ],
)
def test_passes_of_accumulation_are_told_from_the_last(signatures: str, ends: list[int]) -> None:
    assert passes(signatures) == ends


def test_an_optimizer_that_was_not_called_yet_is_waited_for() -> None:
    """Gradient accumulation over many passes looks like a pattern of its own."""
    assert passes(50 * "0", is_patient=True) == []
    assert passes((MAX_PASSES + 1) * "1", is_patient=True) == list(range(1, MAX_PASSES + 2))


def test_passes_that_are_too_long_ago_are_counted() -> None:
    cycle = BackwardCycle()
    for number in range(MAX_PASSES + 10):  # no pattern
        assert cycle.ended([number]) == Ends()
    cycle.ended([0])
    assert cycle.num_forgotten == 11


def test_an_optimizer_that_is_called_beside_the_loop_makes_no_iteration_longer() -> None:
    cycle = OptimizerCycle()
    ends = [cycle.ended("loop's", True, num_uncalled) for num_uncalled in (1, 1, 0, 0)]
    assert [(end.earlier, end.at_this_call) for end in ends] == [((), False)] * 2 + [
        ((2, 1), True),
        ((), True),
    ]

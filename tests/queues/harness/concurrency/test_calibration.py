"""Pieces corrected by kernels, against a device made by hand that says when its kernels really ran."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from aorta.queues.harness.concurrency.kernels import Kernel, read_kernels
from aorta.queues.harness.concurrency.piece_calibration import Uncalibrated, calibrate, calibrated, matched
from aorta.queues.harness.concurrency.piece_statistics import concurrency
from aorta.queues.harness.iterations.pieces import Window
from aorta.queues.workload import Piece
from aorta.timeline.intervals import intersect, intervals, length_ms

UNIX_NS = 1_795_000_000_000_000_000
CLOCKS_APART_NS = 7_777_000
"""Of events and of the trace: the harness cannot know it."""
TRACES = Path(__file__).parents[5] / "shared" / "data" / "traces"
NONE = Window([], {})


class Made:
    """Iterations of a GEMM of 4 ms in two kernels with a gap of 0.5, and a collective beside it whose kernel
    waits for room, as the events see them and as they were."""

    def __init__(self, num: int, seed: int, launch_ms: float = 0.1, clock_us: int = 0) -> None:
        rng = np.random.default_rng(seed)
        pieces: list[Piece] = []
        self.kernels: list[Kernel] = []
        host_ns: list[tuple[int, int]] = []
        self.comm_ms: list[float] = []
        self.hidden_ms: list[float] = []
        for index in range(num):
            fork_ns = UNIX_NS + index * 10_000_000
            wait_ms, length_ms_ = rng.uniform(0.2, 0.6), rng.uniform(1.0, 1.2)
            gemm = [(launch_ms, launch_ms + 1.5), (launch_ms + 2.0, launch_ms + 4.0)]
            comm = [(launch_ms + wait_ms, launch_ms + wait_ms + length_ms_)]
            # The stream of the GEMM is empty: its event passes at 0, the launch comes launch_ms later.
            pieces.append(Piece("iteration", index, 0, "gemm", 0.0, 0.01, gemm[-1][1] + 0.002, launch_ms))
            pieces.append(
                Piece("iteration", index, 1, "comm", 0.0, launch_ms, comm[-1][1] + 0.002, launch_ms - 0.01)
            )
            for number, spans in enumerate((gemm, comm)):
                began_ns = fork_ns + 1000 * (5 + 100 * number)
                host_ns.append((began_ns, began_ns + 40_000))
                self.kernels += [
                    Kernel(
                        began_ns + 20_000 - 1000 * clock_us,
                        *(fork_ns + CLOCKS_APART_NS + round(1e6 * ms) for ms in span),
                    )
                    for span in spans
                ]
            self.comm_ms.append(length_ms(intervals(comm)))
            self.hidden_ms.append(length_ms(intersect(intervals(comm), intervals(gemm))))
        self.kernels.sort()
        self.window = Window(pieces, {index: 10.0 * index for index in range(num)}, host_ns)


class Copies(NamedTuple):
    window: Window
    kernels: list[Kernel]


def copies(late_ms: float) -> Copies:
    """Iterations of one communication piece on an empty stream: its kernel of 0.03 ms starts late_ms after
    its event, and its end event passes 0.01 later."""
    pieces, kernels, host_ns = [], [], []
    for index in range(4):
        fork_ns = UNIX_NS + index * 10_000_000
        end_ms = late_ms + 0.03
        pieces.append(Piece("iteration", index, 0, "comm", 0.0, 0.01, end_ms + 0.01, late_ms + 0.01))
        host_ns.append((fork_ns, fork_ns + 100_000))
        start_ns, end_ns = (fork_ns + CLOCKS_APART_NS + round(1e6 * ms) for ms in (late_ms, end_ms))
        kernels.append(Kernel(fork_ns + 50_000, start_ns, end_ns))
    return Copies(Window(pieces, {index: 10.0 * index for index in range(4)}, host_ns), kernels)


def test_hidden_time_of_other_iterations_is_that_of_their_kernels() -> None:
    learned, other = Made(12, seed=1), Made(12, seed=2)
    raw = concurrency(other.window, NONE)
    found = concurrency(calibrated(other.window, calibrate(learned.window, learned.kernels)), NONE)
    assert raw is not None
    assert found is not None
    assert raw.hidden_ms is not None
    comm_ms, hidden_ms = float(np.mean(other.comm_ms)), float(np.mean(other.hidden_ms))
    assert abs(raw.hidden_ms - hidden_ms) > 0.2 * comm_ms
    assert found.comm_ms == pytest.approx(comm_ms, rel=0.05)
    assert found.hidden_ms == pytest.approx(hidden_ms, abs=0.05 * comm_ms)


def test_kernels_keep_their_length_however_late_they_are_launched() -> None:
    learned, other = Made(6, seed=1, launch_ms=0.3), Made(6, seed=2, launch_ms=0.1)
    window = calibrated(other.window, calibrate(learned.window, learned.kernels))
    gemms = [piece for piece in window.pieces if piece.name == "gemm"]
    for piece in gemms:
        assert piece.duration_ms == pytest.approx(4.0, abs=1e-3)
        assert piece.start_ms == pytest.approx(0.1, abs=5e-3)
        assert [end - start for start, end in piece.spans_ms] == pytest.approx([1.5, 2.0], abs=1e-3)


@pytest.mark.parametrize(("others", "start_ms"), [(True, 0.15), (False, 0.22)])
def test_copies_in_the_place_of_communication_keep_their_length(others: bool, start_ms: float) -> None:
    """Under the profiler the host is 0.14 ms late with a copy of 0.03, without it 0.2: only a length that
    depends on other ranks is not kept."""
    first = copies(late_ms=0.14)
    found = calibrated(copies(late_ms=0.21).window, calibrate(first.window, first.kernels), others)
    for piece in found.pieces:
        assert (piece.start_ms, piece.end_ms) == pytest.approx((start_ms, 0.25), abs=1e-3)


def test_communication_never_calibrates_to_nothing() -> None:
    """Late by 0.14 ms under the profiler and by 0.05 without: by the distance from its event it would begin
    after its end."""
    first = copies(late_ms=0.14)
    found = calibrated(copies(late_ms=0.05).window, calibrate(first.window, first.kernels))
    assert [piece.duration_ms for piece in found.pieces] == pytest.approx([0.03] * 4, abs=1e-3)


@pytest.mark.parametrize("clock_us", [0, 12, -25])
def test_clocks_that_disagree_are_shifted_onto_each_other(clock_us: int) -> None:
    """A piece is submitted in 40 µs, its launch in the middle: with 12 µs launches still have theirs."""
    made = Made(5, seed=0, clock_us=clock_us)
    shift_us, of_piece, num_outside = matched(made.window, made.kernels)
    assert [len(kernels) for kernels in of_piece] == [2, 1] * 5
    assert num_outside == 0
    assert (shift_us == 0) == (abs(clock_us) < 20)


def test_a_piece_without_kernels_takes_no_time() -> None:
    """A collective of a single rank starts nothing."""
    made = Made(5, seed=0)
    gemm = [kernel for at, kernel in enumerate(made.kernels) if at % 3 != 2]
    found = concurrency(calibrated(made.window, calibrate(made.window, gemm)), NONE)
    assert found is not None
    assert found.comm_ms is None


def without_pieces(window: Window, iterations: Iterable[int]) -> Window:
    """The last piece of some iterations left out."""
    kept = [
        at
        for at, piece in enumerate(window.pieces)
        if piece.name != "comm" or piece.iteration not in iterations
    ]
    return Window([window.pieces[at] for at in kept], window.fork_ms, [window.host_ns[at] for at in kept])


def test_what_does_not_match_is_not_calibrated() -> None:
    made = Made(5, seed=0)
    with pytest.raises(Uncalibrated, match="no kernel was launched within a piece"):
        calibrate(made.window, [])
    late = [kernel._replace(launch_ns=kernel.launch_ns + 10**9) for kernel in made.kernels]
    with pytest.raises(Uncalibrated, match="no kernel"):
        calibrate(made.window, late)
    short = Made(2, seed=0)
    with pytest.raises(Uncalibrated, match="gemm, piece 0: kernels match in 2 of 2 iterations, 3 are needed"):
        calibrate(short.window, short.kernels)
    with pytest.raises(Uncalibrated, match="differ in their number of pieces"):
        calibrated(without_pieces(made.window, [3]), calibrate(made.window, made.kernels))


def test_an_iteration_without_its_kernels_is_left_out() -> None:
    """The profiler may miss the first ones."""
    made = Made(6, seed=0)
    whole, cut = calibrate(made.window, made.kernels), calibrate(made.window, made.kernels[3:])
    assert cut.num_kernels == whole.num_kernels - 3
    assert cut.shifts[0, True].length_ms == pytest.approx(whole.shifts[0, True].length_ms)


def test_raw_pieces_stay_as_they_were() -> None:
    made = Made(5, seed=0)
    before = [replace(piece) for piece in made.window.pieces]
    calibrated(made.window, calibrate(made.window, made.kernels))
    assert made.window.pieces == before


@pytest.mark.skipif(not TRACES.exists(), reason="needs the traces of shared/data")
def test_every_activity_of_a_trace_has_its_launch() -> None:
    kernels = read_kernels(TRACES / "h200_fsdp4_rank0.json.gz")
    assert len(kernels) == 860 + 178 + 28  # kernels, fills, copies
    assert all(kernel.launch_ns <= kernel.start_ns <= kernel.end_ns for kernel in kernels)
    assert abs(kernels[0].launch_ns - UNIX_NS) < 10**9 * 86400 * 30  # a Unix time

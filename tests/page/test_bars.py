"""The pictures of a report: how high bars are, and what is written above them."""

import math

import numpy as np
import pytest

from aorta.page.figures import MAX_BARS, bars_of, timeline_figure, timeline_png
from tests.account.reports_in_memory import dataset_of
from tests.records.run_folders import step_record, step_timeline


def picture_data(steps, slow=None, num_warmup=0):
    """Steps take 10 ms, but those in slow: {global step: ms}."""
    records = [
        step_record(step_timeline(compute=(slow or {}).get(step, 10.0) - 2.0, step=step), 1) for step in steps
    ]
    return dataset_of("a", {0: records}, num_warmup=num_warmup)


@pytest.mark.heavy
def test_neighbouring_steps_share_a_bar():
    """Two steps a bar: 0 1 | 2 3 | 4 10 | 11 12 | ..."""
    steps = [*range(5), *range(10, 10 + MAX_BARS)]
    bars = bars_of(picture_data(steps, slow={4: 70.0}).first)
    assert bars.per_bar == 2
    assert bars.first_step[:4].tolist() == [0, 2, 4, 11]
    assert bars.greatest[:4].tolist() == pytest.approx([10.0, 10.0, 40.0, 10.0])
    assert bars.peak[:4].tolist() == pytest.approx([10.0, 10.0, 70.0, 10.0])


@pytest.mark.heavy
@pytest.mark.parametrize("num_steps", [12, 30, 110, 300])
def test_labels_of_bars_that_are_cut_off_do_not_overlap(num_steps):
    """Labels slant alike, so they are apart where their lines are farther apart than a letter is high."""
    slow = {0: 1830.0, 1: 88.0, 2: 152.0, 3: 151.0, 4: 118.0}
    figure = timeline_figure(picture_data(range(num_steps), slow, num_warmup=5))
    axis = figure.axes[0]
    figure.canvas.draw()
    labels = [text for text in axis.texts if text.get_text().startswith("↑")]
    assert "↑ 1,830 ms" in [label.get_text() for label in labels]
    assert len({label.get_rotation() for label in labels}) == 1
    x_px = sorted(axis.transData.transform((label.xy[0], 0))[0] for label in labels)
    slant = math.sin(math.radians(labels[0].get_rotation()))
    letter_px = labels[0].get_fontsize() / 72 * figure.dpi
    assert all(apart * slant >= letter_px for apart in np.diff(x_px).tolist())
    if num_steps == 30:
        assert len(labels) == 5


def without(judged, *metrics):
    for name in metrics:
        judged.run.metrics[name][:] = np.nan
    return judged


def test_bars_are_means_over_ranks_whose_parts_add_up_to_the_step():
    """Rank 0 takes 10 ms, rank 1 13 ms, of which 3 ms more are idle."""
    by_rank = {
        rank: [step_record(step_timeline(idle=1.0 + 3 * rank, rank=rank, step=step)) for step in range(6)]
        for rank in range(2)
    }
    bars = bars_of(dataset_of("a", by_rank).first)
    assert np.sum(bars.parts, axis=0).tolist() == pytest.approx([11.5] * 6)
    assert [part[0] for part in bars.parts] == pytest.approx([4.5, 3.5, 1.0, 2.5, 0.0])
    assert (bars.least[0], bars.greatest[0]) == (10.0, 13.0)


@pytest.mark.heavy
def test_where_the_parts_were_not_measured_the_whole_step_is_drawn_as_not_told_apart():
    data = picture_data(range(12))
    without(data.first, "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
    axis = timeline_figure(data).axes[0]
    assert [one.get_label() for one in axis.containers] == ["not told apart"]
    assert [bar.get_height() for bar in axis.containers[0]] == pytest.approx([10.0] * 12)


def test_where_steps_were_not_measured_their_parts_are_drawn_on_a_scale_that_holds_them():
    data = picture_data(range(12))
    without(data.first, "step_ms")
    axis = timeline_figure(data).axes[0]
    assert 10.0 < axis.get_ylim()[1] < 15.0


def test_where_nothing_was_measured_no_bar_is_drawn():
    data = picture_data(range(12))
    without(data.first, "step_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
    axis = timeline_figure(data).axes[0]
    assert axis.containers == []
    assert "neither steps nor their parts were measured" in [text.get_text() for text in axis.texts]


@pytest.mark.heavy
def test_a_rare_slow_step_shows_where_steps_share_a_bar():
    """Two steps a bar: the mean hides the slow one, the label does not."""
    data = picture_data(range(2 * MAX_BARS), slow={123: 137.0})
    axis = timeline_figure(data).axes[0]
    assert "↑ 137.0 ms" in [text.get_text() for text in axis.texts]


@pytest.mark.heavy
@pytest.mark.filterwarnings("error")
def test_letters_that_the_font_lacks_are_no_warning():
    assert timeline_png(dataset_of("日本語", {0: [step_record(step_timeline(step=i), 1) for i in range(4)]}))


@pytest.mark.heavy
@pytest.mark.parametrize("label", ["A" * 100, "several words " * 7 + "x", "$x^2_$"])
def test_labels_of_any_length_leave_the_picture_its_room(label):
    figure = timeline_figure(
        dataset_of(label, {0: [step_record(step_timeline(step=i), 1) for i in range(12)]})
    )
    figure.canvas.draw()
    box = figure.axes[0].get_window_extent()
    assert box.width > 0.5 * figure.bbox.width
    assert box.height > 0.4 * figure.bbox.height

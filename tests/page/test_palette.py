"""Colours against their background (WCAG 2.2) and against each other for colour-blind readers."""

from itertools import combinations

import numpy as np
import pytest

from aorta.page.parts import DARK, LIGHT, MARKS

TEXT_CONTRAST, MARK_CONTRAST = 4.5, 3.0
"""Success criteria 1.4.3 (AA) and 1.4.11."""
APART = 16.0
"""CIE76 distance; 2.3 is a just noticeable difference of large patches."""
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}  # fmt: skip
THEMES = pytest.mark.parametrize("theme", [pytest.param(LIGHT, id="light"), pytest.param(DARK, id="dark")])


def linear(colour):
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_contrast_of_black_on_white_is_21():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@THEMES
@pytest.mark.parametrize("name", ["ink", "muted", "accent", "worse", "better"])
def test_text_is_legible(theme, name):
    assert min(contrast(theme[name], theme[ground]) for ground in ("paper", "panel")) >= TEXT_CONTRAST


@THEMES
@pytest.mark.parametrize("name", [*(mark for mark in MARKS if mark != "idle"), "outline", "accent"])
def test_marks_stand_out_from_the_paper(theme, name):
    """idle is pale and has the outline."""
    assert contrast(theme[name], theme["paper"]) >= MARK_CONTRAST


@THEMES
@pytest.mark.parametrize("vision", VISION)
def test_marks_are_told_apart(theme, vision):
    seen = {name: lab(np.clip(np.array(VISION[vision]) @ linear(theme[name]), 0, 1)) for name in MARKS}
    for a, b in combinations(MARKS, 2):
        assert np.linalg.norm(seen[a] - seen[b]) >= APART, (a, b)

"""The colours of everything that aorta draws. Each means one thing, in pictures and on the page.

Chosen so that they stay apart for readers who do not see red, green or blue, and against their
background: tests/report/output/test_palette.py computes both. idle is pale on purpose, nothing happens there;
it is drawn with an outline.
"""

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f6f7f9",
    "line": "#dfe3e8",
    "outline": "#868e99",
    "ink": "#1b2129",
    "muted": "#59626e",
    "accent": "#5645b0",
    "compute": "#2f6299",
    "hidden": "#3fa096",
    "exposed": "#ad3706",
    "wait": "#cf7f2b",
    "idle": "#e3e6ea",
    "worse": "#b23c08",
    "better": "#1d716a",
}

DARK = {
    "paper": "#14171c",
    "panel": "#1c2128",
    "line": "#313842",
    "outline": "#737c88",
    "ink": "#e6e9ed",
    "muted": "#a3acb8",
    "accent": "#a99cf5",
    "compute": "#4583c4",
    "hidden": "#6fc9be",
    "exposed": "#ee6c33",
    "wait": "#f6b877",
    "idle": "#2a3038",
    "worse": "#f58b5c",
    "better": "#6fc9be",
}

MARKS = ("compute", "hidden", "exposed", "wait", "idle")
"""Where time goes; wait is the part of exposed in which some rank had not arrived."""

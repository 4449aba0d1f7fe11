"""Exit codes of every command, and the verdicts that lead to them."""

FINE = 0
"""The command did what was asked; every limit holds."""
VIOLATED = 1
"""A limit is violated, or a difference was found where the command was asked to fail on it."""
BAD_INPUT = 2
"""An option, a file or the machine does not allow it. One line on stderr says what would work."""
CANNOT_TELL = 3
"""Nothing is violated, but the data do not suffice to say that all is fine."""
INTERRUPTED = 130

EXIT_CODES = {
    "met": FINE,
    "violated": VIOLATED,
    "not judged": CANNOT_TELL,
    "no regression": FINE,
    "regression": VIOLATED,
    "cannot tell": CANNOT_TELL,
}
"""By the verdict on all limits of a budget, or on all metrics of two results with a threshold. A comparison
of runs without limits says better, worse, no difference seen or cannot tell of each metric; its exit code is
FINE unless --fail-on-difference is given."""

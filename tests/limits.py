"""How long tests wait for processes."""

LIMIT_S = 600.0
"""Ends what hangs. No test passes or fails by it: starting a rank takes minutes on a loaded machine."""

AT_ONCE_S = 30.0
"""Longer than a loaded machine delays what happens at once, half of what a stand-in sleeps."""

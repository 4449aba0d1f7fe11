"""Runs and traces loaded, judged and compared: every number that is shown comes from here. No torch."""

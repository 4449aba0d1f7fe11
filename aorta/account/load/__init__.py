"""Loads runs: records and traces, their attempts, ranks and waits."""

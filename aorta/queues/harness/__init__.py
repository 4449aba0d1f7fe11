"""Runs a workload and turns what happened into numbers."""

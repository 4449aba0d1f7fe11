"""Runs a workload and turns what happened into numbers: pieces, iterate, metrics, scaling, measure on top."""

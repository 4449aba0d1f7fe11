"""Hangs: a watchdog per rank writes where the rank stands; together the ranks' reports say who is missing.

Nothing is imported here: who reads reports needs no torch, as the watchdog does.
"""

"""Checks of host programs, of one rank and of ranks against each other."""

"""Checks of host programs, of traces and of CUDA graphs against them."""

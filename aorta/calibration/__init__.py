"""Adds to a run's records what kernel traces of some of its steps say, after the run.

    after_run.py     at the end of a run: traces of the profiler -> lines, coverage and calibration
    merge.py         the same by command, for traces of other tools that lie beside the records
    kernel_lines.py  one trace and one rank's lines: matching them, and lines of the trace's source

The arithmetic of the correction is in aorta/steps/calibration.py.
"""

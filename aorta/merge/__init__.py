"""Adds to a run's records what kernel traces of some of its steps say, after the run.

windows.py  at the end of a run: traces of the profiler -> lines and coverage
command.py  the same by command, for traces of other tools that lie beside the records
lines.py    one trace and one rank's lines: matching them, and lines of the trace's source
"""

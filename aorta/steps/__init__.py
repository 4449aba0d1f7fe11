"""Turns the steps of one rank into step records; without torch, in a process of its own.

The way of a step, in the order in which to read the files:

    notes.py             what is noted of a step and sent: RecordedStep, KernelChunk, each in a Frame
    process.py           the process: reads frames, keeps the steps in order (StepQueue), writes lines
    event_steps.py       a step timed by events, or on a CPU by the host's clock -> StepRecord
    kernel_steps.py      a step timed by the driver's kernel records -> StepRecord
    record.py            the fields of a record that do not depend on what timed the step
    told.py              what a line leaves out of its record
    left_out.py          lines of steps that the overhead leaves out
    unwritten.py         steps that are closed and not written yet, in a file, lest the process is killed
"""

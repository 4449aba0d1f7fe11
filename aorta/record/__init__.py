"""The instrument: watches a training process and has one line of numbers written per step and rank.

Which file to open:

    recorder.py       what a training script holds: life, and the parts tied together
    open_steps.py     begins and ends steps
    sources.py        what sees the program, put on and taken off
    output.py         the folder, the writer of lines, telemetry
    handles.py        `with recorder.step()`, scalars that are logged, steps that end in retrospect
    calls.py          what is noted of a step and of a collective: the types
    journal.py        where it is noted, from all threads
    interception/     sees every collective and every wait, by whatever path; start at switch.py
    event_observer.py, cpu_observer.py         time the collectives: by CUDA or HIP events, by the host
    kernel_source.py                           the driver's kernel records
    collective_names.py                        what each collective is for: module, bucket, optimizer
    host.py           batches, backward passes, optimizers, waits and cores of the host
    extract.py        a closed step's marks -> plain numbers
    sending.py        the thread that does this, and the process that writes the lines
    run_folder.py, description.py              who may write into the folder; run.json
    companions.py     what runs beside a recorder; profiler.py and ranges.py are such
    settings.py       options of aorta.instrument, checked
"""

from aorta.record.handles import StepHandle
from aorta.record.recorder import Recorder
from aorta.record.settings import RecorderSettings

__all__ = ["Recorder", "RecorderSettings", "StepHandle"]

"""The training command on ranks with a trouble of their own."""

import os
import resource
import time

from aorta.record.recorder import Recorder
from aorta.training import command


def first_rank_is_late(arguments: list[str]) -> int:
    """Rank 0 starts a second after the others."""
    command.LATE_S = 60.0  # of a busy machine; the launcher ends the others with the first
    time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)
    return command.main(arguments)


def disk_of_rank_1_is_full(arguments: list[str]) -> int:
    """Files of rank 1 cannot grow beyond 16 KiB, and it takes three seconds to finish its records."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
        close = Recorder.close

        def close_late(recorder: Recorder, *arguments: object, **options: object) -> None:
            time.sleep(3.0)
            close(recorder, *arguments, **options)  # type: ignore[arg-type]

        Recorder.close = close_late  # type: ignore[method-assign]
    return command.main(arguments)

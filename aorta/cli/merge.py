"""aorta merge."""

import click


@click.command("merge")
@click.argument("run", metavar="RUN")
def merge_command(run: str) -> int:
    """Add what kernel traces beside a run's records say to the records.

    RUN is the folder of a run with traces in rank<n>/ (rocprofv3, Nsight Systems) or in
    torch_profiler/rank<n>/. Doing it again adds nothing.
    """
    from aorta.calibration.merge import main

    return main([run])

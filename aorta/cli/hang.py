"""aorta hang."""

import click


@click.command("hang")
@click.argument("run", metavar="RUN", default="artifacts")
def hang_command(run: str) -> int:
    """Name the rank and the collective that the others wait for.

    RUN is the folder of a run whose watchdog wrote reports (default: artifacts).
    """
    from aorta.hang.__main__ import main

    return main([run])

"""aorta hang."""

import click


@click.command("hang")
@click.argument("run", metavar="RUN", default="artifacts")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def hang_command(run: str, as_json: bool) -> int:
    """Name the rank and the collective that the others wait for.

    RUN is the folder of a run whose watchdog wrote reports (default: artifacts).
    """
    from aorta.hang.__main__ import main

    return main([run, *(["--json"] if as_json else [])])

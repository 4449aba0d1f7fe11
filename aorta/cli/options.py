"""Options that `report`, `compare`, `why` and analysis/overlap_report.py share, each declared once.

`why` lacks some of them: it writes no files (outputs, limits), takes one run and names it by its path
(--label), and replays only steps that a trace marks itself (--step-kernel, --step-period). Every command
that reads traces has comm_rules_option.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from aorta.command_line import Decorated, option_group, rare
from aorta.errors import ReportError


class _Place(click.Path):
    """A path that refuses the empty text, which would name the current folder where a variable is unset."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty; the current folder is '.'", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Place(path_type=Path, readable=False)
"""A place that the command itself opens: its message says whose it is and what is wrong."""


# ---- values --------------------------------------------------------------------------------------


class NumberRange(click.FloatRange):
    """A FloatRange that refuses nan: it is below no bound, and no wait of that length ends."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


MOST_RANKS = 1_000_000


def step_span(option: str, text: str | None) -> tuple[int, int] | None:
    """The first and the last step of FIRST:LAST; ReportError for other text."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not first.strip().isdecimal() or (colon and not last.strip().isdecimal()):
        raise ReportError(f"{option} {text} is not FIRST:LAST, as in 10:40")
    span = int(first), int(last) if colon else int(first)
    if span[1] < span[0]:
        raise ReportError(f"{option} {text}: the last step comes before the first")
    return span


def rank_set(option: str, text: str | None) -> set[int] | None:
    """The ranks of a list such as 0,1,4-7; ReportError for other text."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ReportError(f"{option} {text} is not a list of ranks, as in 0,1,4-7")
        end = int(last if dash else first) + 1
        if end > MOST_RANKS:
            raise ReportError(f"{option} {text}: ranks are below {MOST_RANKS:,}")
        if end <= int(first):
            raise ReportError(f"{option} {text}: the last rank comes before the first")
        chosen.update(range(int(first), end))
    return chosen


def _parsed(parse: Callable[[str, str | None], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    return lambda ctx, parameter, text: parse(parameter.opts[0], text)


# ---- options of all of them ----------------------------------------------------------------------


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

warmup_option = click.option(
    "--warmup", type=click.IntRange(0), metavar="N", help="Leave out N leading steps; default: by rule."
)


def steps_and_ranks(
    prefix: str, verb: str, rest: str, option: Callable[..., Any]
) -> Callable[[Decorated], Decorated]:
    """--steps and --ranks to judge the chosen ones (`why`), or --draw-steps and --draw-ranks to draw them."""
    return option_group(
        option(
            f"--{prefix}steps",
            "steps",
            metavar="FIRST:LAST",
            callback=_parsed(step_span),
            help=f"{verb} only these global steps{rest}.",
        ),
        option(
            f"--{prefix}ranks",
            "ranks",
            metavar="0,1,4-7",
            callback=_parsed(rank_set),
            help=f"{verb} only these ranks{rest}.",
        ),
    )


reading_options = option_group(
    rare(
        "--strict",
        is_flag=True,
        section="Reading",
        help="Refuse a run with damaged or missing files, instead of reading what is left.",
    ),
    rare(
        "--jobs",
        type=click.IntRange(1),
        metavar="N",
        section="Reading",
        help="Processes that read ranks. Default: one per core; 1 below 16 MiB to read.",
    ),
    rare(
        "--dask",
        metavar="ADDRESS",
        section="Reading",
        help="Read ranks on the workers of this Dask scheduler: tcp://host:8786.",
    ),
)


# ---- options of commands that write a report -----------------------------------------------------


def file_options(by_default: bool) -> Callable[[Decorated], Decorated]:
    """Which files are written beside summary.json; by_default: all of them, rather than the page alone."""

    def option(name: str, files: str, default: bool) -> Callable[[Any], Any]:
        return rare(
            f"--{name}/--no-{name}",
            default=default,
            section="Files that are written",
            help=f"Write {files}, or not.",
        )

    return option_group(
        option("page", "report.html", True),
        option("perfetto", "{label}.perfetto.json.gz", by_default),
        option("parquet", "steps.parquet", by_default),
    )


comm_rules_option = rare(
    "--comm-rules",
    type=PATH,
    section="Traces",
    help="YAML file: kernels that are communication, by name.",
)

trace_options = option_group(
    comm_rules_option,
    rare(
        "--step-kernel",
        metavar="NAME",
        section="Traces",
        help="A step begins at every kernel with NAME in its name.",
    ),
    rare(
        "--step-period",
        type=click.IntRange(1),
        metavar="N",
        section="Traces",
        help="A step has N kernels of the compute stream, or N of --step-kernel.",
    ),
)


class Share(click.ParamType):  # type: ignore[type-arg]
    """A part of a whole as a user writes it: 3%, 3, 0.5%; percent either way."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            share = float(str(value).strip().removesuffix("%")) / 100
        except ValueError:
            self.fail(f"{value!r} is not a size such as 3%", param, ctx)
        if not 0 < share < 1:
            self.fail(f"{value!r} must be above 0 and below 100%", param, ctx)
        return share


matters_option = click.option(
    "--matters",
    type=Share(),
    default="3%",
    metavar="PERCENT",
    help="Smallest change that matters; default: 3%.",
)

run_spread_option = rare(
    "--run-spread",
    type=Share(),
    metavar="PERCENT",
    section="Single runs",
    help="Standard deviation between runs of the job, where you know it (`aorta ab` prints it).",
)

limit_options = option_group(
    click.option("--budget", type=PATH, help="YAML of limits: 'exposed_ms: {max: 12.0}'."),
    rare(
        "--junit",
        type=PATH,
        section="Continuous integration",
        help="Write the limits' verdicts as JUnit XML.",
    ),
    rare(
        "--markdown",
        type=PATH,
        section="Continuous integration",
        help="Write a summary of the comparison and the limits.",
    ),
)

long_option = click.option(
    "--long", is_flag=True, help="Both reports and every metric; of a trace its operators."
)
report_options = option_group(
    click.option("--open", "open_page", is_flag=True, help="Open the page in a browser."),
    json_option,
    warmup_option,
    limit_options,
    steps_and_ranks(
        "draw-",
        "Draw",
        " in the Perfetto trace and the page's timeline; the numbers are of all",
        lambda *names, **attributes: rare(*names, section="Drawing", **attributes),
    ),
    reading_options,
    trace_options,
)


def label_option(**attributes: Any) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--label", multiple=True, metavar="NAME", help="Name of each run, in order; may repeat.", **attributes
    )


def output_option(*, file_okay: bool = True, **attributes: Any) -> Callable[[Decorated], Decorated]:
    folder = _Place(path_type=Path, readable=False, file_okay=file_okay)
    return click.option("--output", "-o", type=folder, metavar="DIR", **attributes)

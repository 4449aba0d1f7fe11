"""The command line of one rank of the training loop: `aorta train`, train.py, python -m aorta.training."""

import argparse
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

import torch

from aorta.config.layout import validate
from aorta.config.load import load_config
from aorta.device.kernel_records import KernelRecordsUnavailable, name_tool
from aorta.errors import AortaError
from aorta.launcher import is_first_of_machine, is_first_rank, launched_rank, rank_text
from aorta.training import AgreedError, Summary, train

DEFAULT_CONFIG = "default"
DESCRIPTION = "Train a small decoder and record where its steps lose time."

LATE_S = 2.0
"""Seconds that a silent rank waits before it exits: a launcher ends all ranks with the first that exits, and
the rank that prints the error may have started later."""


def training_parser(prog: str = "train.py") -> "Parser":
    """The options of one rank."""
    parser = Parser(prog=prog, description=DESCRIPTION)
    parser.add_argument(
        "--config", default=DEFAULT_CONFIG, help="default, ddp, fsdp, fsdp_tp, moe, tp, or a YAML file"
    )
    parser.add_argument(
        "--override",
        nargs="+",
        action="extend",
        default=[],
        metavar="A.B=C",
        help="settings that replace those of the file; may repeat",
    )
    return parser


def main(arguments: list[str] | None = None, prog: str = "train.py") -> int:
    """Train as one of the ranks that the environment names; return the exit status."""
    options = training_parser(prog).parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        num_ranks = launched_rank().world_size
    except AortaError as error:
        return fail(prog, str(error), says=True)
    try:
        config = load_config(options.config, options.override)
        validate(config, num_ranks)
    except AortaError as error:
        return fail(prog, str(error), says=is_first_of_machine())
    if config.recording.kernels == "on" and torch.version.hip is not None:
        with suppress(KernelRecordsUnavailable):  # the recorder says why
            name_tool(os.environ)  # before HIP initialises: any question about devices does that
    try:
        summary = train(config)
    except AgreedError as error:
        return fail(prog, str(error), says=is_first_rank())
    except AortaError as error:  # this rank's own: its device, its file system
        return fail(prog, f"rank 0: {error}" if is_first_rank() and num_ranks > 1 else str(error), says=True)
    if is_first_rank():
        print(describe(summary))
    return 0


def describe(summary: Summary) -> str:
    """Steps, losses and output folder of a finished run, for the terminal."""
    steps = f"{summary.num_steps - summary.first_step} steps"
    if summary.first_step:
        steps += f" after {summary.first_step} resumed"
    if summary.stopped_by is not None:
        steps += f", stopped by {signal.Signals(summary.stopped_by).name}"
    loss = ""
    if summary.first_loss is not None and summary.last_loss is not None:
        loss = f"   loss {summary.first_loss:.4f} -> {summary.last_loss:.4f}"
    return f"{steps}{loss}\nwrote {summary.output_dir}"


class Parser(argparse.ArgumentParser):
    """Parser that reports wrong arguments once per machine, not once per rank."""

    def error(self, message: str) -> NoReturn:
        if is_first_of_machine():
            self.print_usage(sys.stderr)
        sys.exit(fail(self.prog, message, says=is_first_of_machine()))


def fail(prog: str, message: str, says: bool) -> int:
    """Exit status of an error; prints it where this rank says it, and waits where another does."""
    if says:
        rank = "" if is_first_rank() else f"rank {rank_text()}: "
        print(f"{prog}: {rank}{message}", file=sys.stderr, flush=True)
    else:
        time.sleep(LATE_S)
    return 2

"""The training loop of one rank: from a Config to a trained model, its records and its checkpoints.

train() is all that others call. setup.py makes what the loop needs before its first step; the Reporter shows
a person the progress meanwhile.
"""

import logging
import queue
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch._C._distributed_c10d import Store

from aorta.attach.instrument import instrument
from aorta.config.layout import Layout, validate
from aorta.config.structs import Config, HangConfig
from aorta.launcher import LaunchedRank, launched_rank
from aorta.record.profiler import why_nothing_is_traced
from aorta.record.ranges import Ranges
from aorta.record.recorder import Recorder
from aorta.records.schema import StepRecord
from aorta.training.checkpoint import Checkpoints, claim_checkpoint_folder
from aorta.training.model import train_flops_per_token
from aorta.training.parallel import ParallelModel, clip_grad_norm, make_meshes
from aorta.training.setup import (
    AgreedError,
    BatchFeed,
    LossScale,
    build_model,
    build_optimizer,
    choose_device,
    learning_rate,
    set_arithmetic,
    start_process_group,
)
from aorta.training.stop import StopAgreement

log = logging.getLogger("aorta")
COMPILES_S = 900.0
"""Seconds that the watchdog allows a first step that compiles."""


@dataclass(frozen=True)
class Summary:
    """Outcome of a run, as rank 0 sees it."""

    first_step: int
    """Steps that the checkpoint held: the first one done here has this number."""
    num_steps: int
    """Steps of the run, those included."""
    first_loss: float | None
    last_loss: float | None
    stopped_by: int | None
    """Number of the signal that ended the run early; None where it ran to its end."""
    output_dir: str


def train(config: Config) -> Summary:
    """Train as the config says, on the ranks of the environment. Every rank calls it.

    Raises ConfigError before any process group exists, except for checkpoints that cannot be read or
    written: that is an AgreedError, when all ranks have finished their records.
    """
    ranks = launched_rank()
    layout = validate(config, ranks.world_size)
    device = choose_device(config, ranks)
    set_arithmetic(config)
    store = start_process_group(config, ranks, device)
    try:
        summary = TrainingRun(config, ranks, layout, device).train(store)
    except AgreedError:
        dist.barrier()  # a launcher ends the other ranks with the first, maybe before their last records
        dist.destroy_process_group()
        raise
    # Not after another error: NCCL would wait for collectives that other ranks may never join.
    dist.destroy_process_group()
    return summary


class TrainingRun:
    """Model, optimizer and state of one run on one rank."""

    def __init__(self, config: Config, ranks: LaunchedRank, layout: Layout, device: torch.device) -> None:
        self.config, self.ranks, self.layout, self.device = config, ranks, layout, device
        training = config.training
        self.num_steps = (
            training.epochs * config.data.steps_per_epoch
            if training.max_steps is None
            else training.max_steps
        )
        claim_checkpoint_folder(config)
        meshes = make_meshes(layout, device.type)
        self.dp_rank = meshes.dp.get_local_rank()
        self.form: ParallelModel = build_model(config, layout, meshes, device)
        self.optimizer = build_optimizer(config, self.form, device)
        self.ranges = Ranges(config.profiling)
        self.scale = LossScale(enabled=training.precision == "fp16")
        self.checkpoints = Checkpoints(config, ranks.rank, self.form.plain, self.optimizer, self.scale)
        self.first_step = self.checkpoints.resume(training.resume) if training.resume is not None else 0

    def train(self, store: Store) -> Summary:
        config, rank = self.config, self.ranks.rank
        self._warn_if_nothing_is_traced()
        with ExitStack() as stack:
            # Left in reverse order: the recorder flushes, the reporter shows the last records; the handlers
            # of signals go last, so that a signal does not cut the flush short.
            stop = stack.enter_context(
                StopAgreement(store, rank, self.ranks.world_size, first_step=self.first_step)
            )
            reporter = (
                stack.enter_context(Reporter(config, self.first_step, self.num_steps))
                if self.ranks.is_first
                else None
            )
            recorder = stack.enter_context(self._recorder())
            if reporter is not None:
                recorder.on_record(reporter.add)
            num_steps = self._loop(stop, recorder)
            if stop.signal_number is not None and num_steps < self.num_steps:
                recorder.stopped(signal.Signals(stop.signal_number).name)
            if config.training.checkpoint_at_end and num_steps > self.first_step:
                with recorder.pausing("checkpoint"):
                    self.checkpoints.save(num_steps)
            dist.barrier()  # nobody stops listening for a stop while another rank still has steps to do
        return Summary(
            first_step=self.first_step,
            num_steps=num_steps,
            first_loss=None if reporter is None else reporter.first_loss,
            last_loss=None if reporter is None else reporter.last_loss,
            stopped_by=stop.signal_number if num_steps < self.num_steps else None,
            output_dir=config.training.output_dir,
        )

    def _warn_if_nothing_is_traced(self) -> None:
        num_steps = self.num_steps - self.first_step
        reason = why_nothing_is_traced(self.config.profiling, num_steps) if num_steps > 0 else None
        if reason is not None and self.ranks.is_first:
            log.warning(reason)

    def _loop(self, stop: StopAgreement, recorder: Recorder) -> int:
        """Do the steps that are left; return the number of steps done, the checkpoint's included."""
        config, checkpoint_every = self.config, self.config.training.checkpoint_every
        feed = BatchFeed(config, self.dp_rank, self.device, self.first_step)
        training = config.training
        tokens = training.batch_size * training.grad_accum_steps * config.data.seq_len
        for global_step in range(self.first_step, self.num_steps):
            if not stop.may_start(global_step):
                return global_step
            epoch, step = divmod(global_step, config.data.steps_per_epoch)
            with (
                recorder.step(tokens=tokens, epoch=epoch, step=step, global_step=global_step) as record,
                self.ranges.step(global_step),
            ):
                loss, grad_norm, lr = self.step(global_step, feed)
                record.log(loss=loss, lr=lr, grad_norm=grad_norm)
            if checkpoint_every and (global_step + 1) % checkpoint_every == 0:
                with recorder.pausing("checkpoint"):
                    self.checkpoints.save(global_step + 1)
        return self.num_steps

    def step(self, global_step: int, feed: BatchFeed) -> tuple[Tensor, Tensor | None, float]:
        """One optimizer step: this rank's mean loss, the global gradient norm, the learning rate."""
        lr = learning_rate(global_step, self.num_steps, self.config.optimizer.lr, self.config.scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.gradients(feed)
        grad_norm, finite = self._clip()
        with self.ranges("optimizer"):
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm, lr

    def gradients(self, feed: BatchFeed) -> Tensor:
        """Run forward and backward of all micro-batches; return the mean of their cross entropies."""
        num_micro_batches = self.config.training.grad_accum_steps
        total = torch.zeros((), device=self.device)
        for i in range(num_micro_batches):
            token_BS, target_BS = feed.take()
            with self.form.micro_batch(is_last=i == num_micro_batches - 1):
                with self.ranges("forward"), self.form.autocast():
                    loss, aux_loss = self.form.module(token_BS, target_BS)
                objective = loss + self.config.model.aux_loss_weight * aux_loss
                with self.ranges("backward"):
                    (objective * (self.scale.value / num_micro_batches)).backward()
            total += loss.detach() / num_micro_batches
        return total

    def _clip(self) -> tuple[Tensor | None, bool]:
        """The norm, and True if the optimizer may step: fp16 skips a step whose gradients overflowed."""
        max_norm = self.config.training.grad_clip_norm
        if max_norm is None and not self.scale.enabled:
            return None, True
        parameters = self.form.plain.parameters()
        grad_norm = clip_grad_norm(parameters, max_norm, unscale=1.0 / self.scale.value)
        if not self.scale.enabled:
            return grad_norm, True
        finite = bool(grad_norm.isfinite())  # fp16 synchronises here: the scale is the host's to choose
        self.scale.update(finite)
        return grad_norm, finite

    def _recorder(self) -> Recorder:
        config, recording, training = self.config, self.config.recording, self.config.training
        self._warn_if_hangs_end_the_run_first()
        recorder = instrument(
            output_dir=training.output_dir,
            placement=recording.placement,
            device=self.device,
            overhead=recording.overhead,
            telemetry_interval_s=recording.telemetry_interval_s,
            kernels=recording.kernels,
            config=msgspec.to_builtins(self.config),
            model=model_record(self.config),
            layout=layout_record(self.config, self.layout),
            flops_per_token=train_flops_per_token(self.config.model, self.config.data.seq_len),
            precision=training.precision,
            hang=self._hang(),
            profiling=config.profiling,
            tensorboard=config.logging.tensorboard,
        )
        if config.profiling.ranges:  # else collectives need not be seen one by one
            recorder.wrap_observers(self.ranges.observer)
        return recorder

    def _warn_if_hangs_end_the_run_first(self) -> None:
        hang, limit_s = self.config.hang, self.config.distributed.timeout_s
        if hang.enabled and hang.timeout_s >= limit_s and self.ranks.is_first:
            log.warning(
                "hang.timeout_s = %g is not below distributed.timeout_s = %g, which ends the run first",
                hang.timeout_s,
                limit_s,
            )

    def _hang(self) -> HangConfig:
        """The watchdog's settings: a first step that compiles may take long."""
        hang = self.config.hang
        if self.config.compile.enabled and hang.start_timeout_s is None:
            return msgspec.structs.replace(hang, start_timeout_s=COMPILES_S)
        return hang


def model_record(config: Config) -> dict[str, Any]:
    """Entry `model` of run.json."""
    model = config.model
    return {
        "h": model.hidden,
        "f": model.ffn,
        "nh": model.num_heads,
        "nkv": model.num_kv_heads,
        "V": model.vocab_size,
        "L": model.num_layers,
        "E": model.num_experts,
        "k": model.num_active_experts if model.num_experts else 0,
        "recompute": config.training.activation_checkpointing,
    }


def layout_record(config: Config, layout: Layout) -> dict[str, Any]:
    """Entry `layout` of run.json."""
    return {
        "world": layout.world,
        "dp": layout.dp,
        "tp": layout.tp,
        "ep": layout.ep,
        "mbs": config.training.batch_size,
        "seq": config.data.seq_len,
        "grad_accum": config.training.grad_accum_steps,
        "compile": config.compile.enabled,
    }


class Reporter:
    """Shows step records on a thread of its own; add() may be called from any thread and does not block.

    One line that changes on a terminal, a plain line every training.log_interval steps elsewhere. Must
    outlive the recorder, which hands out the last records when it closes.
    """

    def __init__(self, config: Config, first_step: int, num_steps: int) -> None:
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._config, self._first_step, self._num_steps = config, first_step, num_steps
        self._records: queue.SimpleQueue[StepRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aorta-progress", daemon=True)
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._config.logging.progress and sys.stdout.isatty():
            self._progress = _progress_line()
            self._progress.add_task("training", total=self._num_steps, completed=self._first_step, numbers="")
            self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._records.put(None)  # behind all records: the thread shows them before it ends
        self._thread.join(timeout=30)
        if self._progress is not None:
            self._progress.stop()

    def add(self, record: StepRecord) -> None:
        self._records.put(record)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            if record.loss is not None:
                self.first_loss = record.loss if self.first_loss is None else self.first_loss
                self.last_loss = record.loss
            try:
                self._show(record)
            except OSError as error:  # a closed terminal must not end the training
                log.warning("progress is no longer shown: %s", error)
                return

    def _show(self, record: StepRecord) -> None:
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0], completed=record.global_step + 1, numbers=progress_numbers(record)
            )
        elif self._config.logging.progress and self._is_shown(record.global_step):
            print(f"step {record.global_step + 1}/{self._num_steps}  {progress_numbers(record)}", flush=True)

    def _is_shown(self, step: int) -> bool:
        return (step + 1) % self._config.training.log_interval == 0 or step in (
            self._first_step,
            self._num_steps - 1,
        )


def progress_numbers(record: StepRecord) -> str:
    """Loss, step time, exposed time and overlap as text, a dash for each that was not measured."""
    overlap = record.overlap
    time_name, time_ms = ("step", record.step_ms) if record.step_ms is not None else ("host", record.host_ms)
    percent = None if overlap.overlap_ratio is None else 100 * overlap.overlap_ratio
    return "  ".join(
        (
            f"loss {_number(record.loss, '8.4f')}",
            f"{time_name} {_number(time_ms, '8.2f')} ms",
            f"exposed {_number(overlap.exposed_ms, '8.2f')} ms",
            f"overlap {_number(percent, '5.1f')} %",
        )
    )


def _number(value: float | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)


def _progress_line() -> Progress:
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=Console(),
    )

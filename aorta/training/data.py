"""Synthetic text with a rule to learn, and its way to the device. B batch, S sequence."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from aorta.config import Config
from aorta.device.backend import backend_of
from aorta.training.recorder import LoopRecorder

_MAX_ALPHABET = 512


class SyntheticTokens:
    """Walks around a circle of tokens in a fixed random order: each token decides the next.

    A batch is a function of seed, dp rank, step and micro-batch, so a resumed run sees what it would have.
    At most _MAX_ALPHABET different tokens, so that the loss falls soon with any vocabulary.
    """

    def __init__(self, vocab_size: int, seq_len: int, batch_size: int, seed: int, dp_rank: int) -> None:
        self._batch_size, self._seed, self._dp_rank = batch_size, seed, dp_rank
        rng = np.random.default_rng([seed, 0])
        self._circle = rng.permutation(vocab_size)[:_MAX_ALPHABET].astype(np.int64)
        self._offset_S = np.arange(seq_len + 1)

    def batch(self, step: int, micro_batch: int) -> Tensor:
        """int64 on the CPU, one token more than the model reads: the targets are shifted by one."""
        rng = np.random.default_rng([self._seed, 1, self._dp_rank, step, micro_batch])
        start_B = rng.integers(len(self._circle), size=self._batch_size)
        place_BS = (start_B[:, None] + self._offset_S) % len(self._circle)
        return torch.from_numpy(self._circle[place_BS])


class BatchFeed:
    """Micro-batches on the device, in order. The next one is copied while this one is computed on."""

    def __init__(
        self, config: Config, dp_rank: int, device: torch.device, recorder: LoopRecorder, first_step: int
    ) -> None:
        self._tokens = SyntheticTokens(
            config.model.vocab_size,
            config.data.seq_len,
            config.training.batch_size,
            config.training.seed,
            dp_rank,
        )
        self._num_micro_batches = config.training.grad_accum_steps
        self._device = device
        self._recorder = recorder
        self._index = first_step * self._num_micro_batches
        self._devices = backend_of(device)
        prefetches = config.data.prefetch and self._devices.is_device
        self._stream = self._devices.new_stream(device) if prefetches else None
        self._next: tuple[Tensor, Any] | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        """token_BS and target_BS."""
        batch_BS = self._take_copied() if self._stream is not None else self._read().to(self._device)
        return batch_BS[:, :-1], batch_BS[:, 1:]

    def _read(self) -> Tensor:
        step, micro_batch = divmod(self._index, self._num_micro_batches)
        self._index += 1
        return self._tokens.batch(step, micro_batch)

    def _take_copied(self) -> Tensor:
        batch_BS, copied = self._next or self._start_copy()
        current = self._devices.current_stream(self._device.index).stream
        current.wait_event(copied)
        batch_BS.record_stream(current)  # its memory belongs to the copy stream
        self._next = self._start_copy()
        return batch_BS

    def _start_copy(self) -> tuple[Tensor, Any]:
        assert self._stream is not None
        pinned_BS = self._read().pin_memory()
        with self._devices.on_stream(self._stream), self._recorder.range("aux"):
            batch_BS = pinned_BS.to(self._device, non_blocking=True)
            return batch_BS, self._stream.record_event()

"""Learning rate and loss scale over the steps."""

import math

from aorta.config import SchedulerConfig


def learning_rate(step: int, num_steps: int, lr: float, scheduler: SchedulerConfig) -> float:
    """At this global step, counted from 0. Linear rise over warmup_steps, then as scheduler.kind says."""
    if step < scheduler.warmup_steps:
        return lr * (step + 1) / scheduler.warmup_steps
    if scheduler.kind == "constant":
        return lr
    num_after_warmup = max(1, num_steps - 1 - scheduler.warmup_steps)
    progress = min(1.0, (step - scheduler.warmup_steps) / num_after_warmup)
    part = 1 - progress if scheduler.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr * (scheduler.min_lr_ratio + (1 - scheduler.min_lr_ratio) * part)


class LossScale:
    """Keeps fp16 gradients in range: halved when they overflow, doubled after enough steps without.

    torch.amp.GradScaler looks for infinities per tensor mesh; here the global gradient norm, which all
    ranks share, decides, so that sharded and replicated parameters skip the same steps.
    """

    def __init__(self, enabled: bool, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.value = initial if enabled else 1.0
        self.num_good = 0
        self._growth_interval = growth_interval

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        if not finite:
            self.value, self.num_good = max(1.0, self.value / 2), 0
            return
        self.num_good += 1
        if self.num_good == self._growth_interval:
            self.value, self.num_good = self.value * 2, 0

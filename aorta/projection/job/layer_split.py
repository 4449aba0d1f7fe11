"""Layers of the model on the stages of a pipeline."""

from functools import lru_cache

from aorta.errors import ConfigError


def split_layers(
    num_layers: int, num_stages: int, first: int | None = None, last: int | None = None, ends: int = 0
) -> list[int]:
    """Layers per stage in model order, as even as they go.

    first and last fix the end stages. ends: how many layers the embedding and the output layer stand for
    together when the numbers do not divide (they take a layer's place on the first and the last stage).
    Raises where first and last do not leave the other stages the layers that are left, one each or more.
    """
    return list(_counts(num_layers, num_stages, first, last, ends))


@lru_cache(maxsize=1024)
def _counts(
    num_layers: int, num_stages: int, first: int | None, last: int | None, ends: int
) -> tuple[int, ...]:
    _check_ends(num_layers, num_stages, first, last)
    fixed = [first, *([None] * (num_stages - 2)), last] if num_stages > 1 else [first]
    free = [i for i, layers in enumerate(fixed) if layers is None]
    left = num_layers - sum(layers for layers in fixed if layers is not None)
    counts = [layers or 0 for layers in fixed]
    if not free:
        return tuple(counts)
    pretend = left + (ends if first is None and last is None and left % len(free) else 0)
    base, extra = divmod(pretend, len(free))
    for number, stage in enumerate(free):
        counts[stage] = base + (1 if number < extra else 0)
    surplus = sum(counts) - num_layers
    for stage in (num_stages - 1, 0):
        if surplus > 0 and counts[stage] > 0:
            counts[stage] -= 1
            surplus -= 1
    return tuple(counts)


def _check_ends(num_layers: int, num_stages: int, first: int | None, last: int | None) -> None:
    ends = {"--first-stage-layers": first, "--last-stage-layers": last}
    fixed_ends = {name: layers for name, layers in ends.items() if layers is not None}
    for name, layers in fixed_ends.items():
        if layers < 0:
            raise ConfigError(f"{name} must be at least 0, got {layers}")
    free_stages = num_stages - len(fixed_ends)
    total = sum(fixed_ends.values())
    max_layers = num_layers - free_stages
    if not fixed_ends or total == max_layers or (free_stages and total < max_layers):
        return
    flags_text = " and ".join(f"{name} {layers}" for name, layers in fixed_ends.items())
    # The last end is the one to change, unless the first alone is too many.
    fits = [
        (name, max_layers - total + layers)
        for name, layers in fixed_ends.items()
        if max_layers - total + layers >= 0
    ]
    remedy = "fewer stages would work"
    if fits:
        name, layers = fits[-1]
        remedy = f"{name} {layers}{' or fewer' if free_stages else ''} would work"
    need = (
        f"leave one of {num_layers} layers for each other stage"
        if free_stages
        else f"hold all {num_layers} layers"
    )
    raise ConfigError(f"{flags_text} must {need} at --pp x --vpp = {num_stages}; {remedy}")

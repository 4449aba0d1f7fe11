"""The rank that the others wait for, by the causes of its run."""

from aorta.account.model import JudgedRun
from aorta.account.newest import LateRank
from aorta.why.causes.losses.left_out import steps_left_out
from aorta.why.causes.rank import explanation_of


def late_rank(judged: JudgedRun) -> LateRank | None:
    """Of the largest cause of which one rank is late; None where there is none."""
    for cause in explanation_of(judged).causes:
        if cause.is_waited_for and cause.rank is not None:
            # Of steps that were left out: the newest ones are, and the recorded ones may be long ago.
            part = 1.0 if cause.is_in_step else steps_left_out(judged).mean()
            return LateRank(cause.rank, float(cause.ms / part))
    return None

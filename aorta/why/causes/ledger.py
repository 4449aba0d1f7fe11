"""Which milliseconds of the account a finding explains: each of them once, and none that no cell holds."""

from aorta.account.judge.cells import Account
from aorta.why.causes.finding import CauseFinding


class Ledger:
    """Mean ms of a step that are left in each cell."""

    def __init__(self, account: Account) -> None:
        self.left = {name: account.mean_ms(name) for name in account.cells}

    def take(self, finding: CauseFinding) -> dict[str, float]:
        """Take the finding's mean loss out of its cells; what they gave, by cell."""
        taken: dict[str, float] = {}
        for cells, share in finding.takes.items():
            asked = share * finding.mean_ms
            for cell in cells:
                given = min(asked, self.left.get(cell, 0.0))
                if given > 0:
                    self.left[cell] -= given
                    taken[cell] = taken.get(cell, 0.0) + given
                    asked -= given
        return taken

"""Happens-before among streams, by clocks: the one home of this relation.

Operations of one stream are in order. Every other order comes from a wait: a stream that waits for a moment
of another one is from then on behind all that was in the other stream at that moment, and behind all that
that stream was behind. A stream's clock is the count of its own operations and, of each other stream, the
count up to which it is behind; so "a is before b" is one comparison of numbers. The host counts as a stream.

Source: Fidge 1988 and Mattern 1989 (vector clocks); Flanagan and Freund 2009 (FastTrack) for epochs.
"""

from collections.abc import Mapping

Moment = tuple[int, int, Mapping[int, int]]
"""What an event holds: the stream, the count of its operations, and the counts that it was behind."""


class Order:
    """Clocks of streams, which are numbered 0, 1, ... as they are added."""

    __slots__ = ("_behind", "counts")

    def __init__(self) -> None:
        self.counts: list[int] = []
        """Operations of each stream so far."""
        self._behind: list[dict[int, int]] = []
        """Of each stream, the counts of others that it is behind. Not changed in place: moments hold them."""

    def add_stream(self) -> int:
        """Add a stream that is behind nothing, and return its number."""
        self.counts.append(0)
        self._behind.append({})
        return len(self.counts) - 1

    def advance(self, stream: int) -> int:
        """Begin the stream's next operation and return its number, from 1 on."""
        count = self.counts[stream] + 1
        self.counts[stream] = count
        return count

    def now(self, stream: int) -> Moment:
        """Return the moment that an event has which is recorded on the stream now."""
        return stream, self.counts[stream], self._behind[stream]

    def wait(self, stream: int, moment: Moment) -> bool:
        """Put the stream behind a moment. False where it already is, or where the moment is its own."""
        other, count, others = moment
        behind = self._behind[stream]
        if other == stream or behind.get(other, 0) >= count:
            return False  # whoever is behind an operation is behind all that the operation was behind
        joined = dict(behind)
        joined[other] = count
        for third, third_count in others.items():
            if third != stream and third_count > joined.get(third, 0):
                joined[third] = third_count
        self._behind[stream] = joined
        # A wait is an operation itself: without this, a moment from before it and one from after would look
        # alike, and the test above would skip what the wait has brought.
        self.counts[stream] += 1
        return True

    def behind(self, stream: int) -> Mapping[int, int]:
        """Return, by other stream, the count up to which the stream is behind it."""
        return self._behind[stream]


def is_before(stream: int, count: int, moment: Moment) -> bool:
    """True if operation `count` of the stream comes before the moment or is its last one."""
    other, own, others = moment
    return count <= (own if stream == other else others.get(stream, 0))

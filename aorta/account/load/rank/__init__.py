"""From the lines of one rank to its numbers: columns, a row per step."""

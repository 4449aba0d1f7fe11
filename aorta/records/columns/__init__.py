"""The numbers of a rank's lines, many at a time: of the lines, or of columns that the run writes beside them.

Lines are the interface and the truth; columns save decoding them, where they belong to exactly those lines.
"""

"""The numbers of a rank's lines as columns, in a file that the run writes beside them.

Lines are the interface and the truth; columns save decoding them, where they belong to exactly those lines.
"""

"""Hangs: a watchdog on every rank writes where the rank stands; the reports side by side say who is missing.

watchdog    the thread that notices that no step ends, calls the other ranks, and writes the report
meeting     how ranks tell each other, through a store, that they hang, pause, have reported or leave
standing    what the report is made of: collectives, stacks, device, flight recorder
last_calls  mapped files with a rank's latest collectives, for a rank that is killed before it can report
report      the form of hang/rank<n>.json, and reading it
find        who is waited for, from the reports of all ranks; order: who issued collectives in another order
show        `aorta hang`: the answer, a table and stacks

watchdog and standing need torch; the others do not, so that reports can be read anywhere.
"""

"""Arithmetic on what devices did, without devices: plain arrays in, numbers out.

types         Timeline, one rank's spans of work, and the numbers made of it
intervals     sets of spans: union, intersection, difference; row_intervals: the same for many steps at once
overlap       a Timeline to hidden, exposed and idle time, busy streams and segments
collective    names of operations, the stream each counts on, bandwidth
matching      the same collective on several ranks; sequences: finds it where nothing numbers them
common_clock  one clock for all ranks
waits         collectives split into waiting and transfer, and who was late
statistics    numbers of a run with honest intervals, warm-up steps
noise         how far the level of a series may be off: noise with a memory
ratio         two sides compared step by step; sequential: run by run, looked at after every pair
"""

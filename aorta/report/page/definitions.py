"""What the numbers on the page mean; docs/definitions.md has every case."""

DEFINITIONS = (
    (
        "step window",
        "From a step's start to the next step's start, the last step's to its own end. Work that "
        "reaches over an edge counts with the part inside.",
    ),
    (
        "comm_ms",
        "Length of the union of all collectives of a rank, on whatever stream they run. Two at "
        "once count once.",
    ),
    (
        "compute_ms",
        "Kernel traces: union of all kernels that are not communication. Events and host: time in"
        " which the compute stream executes, which is neither in a collective nor stalled on "
        "another stream; gaps with nothing queued are inside it where events cannot see them.",
    ),
    (
        "hidden_ms",
        "Communication and compute at once: the overlap.",
    ),
    (
        "exposed_ms",
        "Communication without compute: comm = hidden + exposed. It splits into waiting, until "
        "the last rank of the collective arrives, and transfer after that.",
    ),
    (
        "idle_ms",
        "Neither communication nor compute: step = compute + exposed + idle. Copies alone are inside it.",
    ),
    (
        "overlap_ratio",
        "hidden / comm. 1: all communication is hidden. 0: all of it blocks compute. Not defined "
        "where there is no communication.",
    ),
    (
        "busbw",
        "As in nccl-tests: bytes / duration, times 2(n \u2212 1)/n for all_reduce and (n \u2212 1)/n for "
        "all_gather, reduce_scatter and all_to_all. Bytes are the larger of a rank's input and "
        "output. GB are 10\u2079 bytes.",
    ),
    (
        "wait, transfer",
        "Of a collective: until the last of its ranks arrives, and after that. The late rank is "
        "the cause, the ranks that wait are its victims.",
    ),
    (
        "host-bound step",
        "A step in which the host was the bottleneck: the compute stream ran dry for more than a fifth of it"
        " on some rank. Compute, communication and hidden are upper bounds there; exposed may be off either"
        " way.",
    ),
    (
        "calibrated",
        "Numbers of events, corrected by kernel traces of other steps of the run; compute is then that of"
        " the kernels of the compute stream. They lead where at least 90 % of the judged steps that were"
        " timed have them on every rank, in a comparison on both sides or against kernels; the raw ones stay"
        " beside them. Parts by operation, waiting and the timeline's spans are raw.",
    ),
    (
        "reference, candidate",
        "The candidate is judged against the reference. Ratio and change are candidate / reference, the"
        " difference is candidate \u2212 reference, of medians. \u2713 is better, \u2717 worse, \u25c6"
        " different, ? cannot tell. Where a step holds unlike work on the two sides, tokens/s per GPU is"
        " judged and times of a step are only called different.",
    ),
    (
        "detectable",
        "The smallest true difference that such runs show in four comparisons of five. \u201cNo difference"
        " seen\u201d says that none is larger than about this, not that there is none.",
    ),
    (
        "cannot tell",
        "Single runs that differ by more than their noise, and by no more than a drift explains that runs"
        " of so few steps cannot show. The reason says how many steps, or a second run a side, would tell.",
    ),
    (
        "median",
        "Of each rank over the judged steps, then over ranks. min and max are the least and greatest rank.",
    ),
    (
        "tokens/s",
        "Tokens of all ranks in a step (ranks of one tensor-parallel group share theirs) over its time; per"
        " GPU: over the number of ranks.",
    ),
    (
        "model FLOP/s, MFU",
        "Tokens/s per GPU times the model FLOPs of a token, forward and backward without what is computed"
        " again; over the data sheet's dense rate of the run's precision, which the page names.",
    ),
    (
        "others wait for it",
        "Mean wait of the other ranks of a group, summed over the collectives of a step in which the rank"
        " came last by more than the clocks may be off.",
    ),
    (
        "clocks, power, memory",
        "The latest sample of the side thread in each step (one a second as a rule); energy per token is"
        " power times step time of all ranks over the tokens. Peak and reserved memory are the allocator's.",
    ),
    (
        "judged steps",
        "Steps that every rank recorded, without the warm-up.",
    ),
    (
        "interval",
        "95 % bootstrap interval over blocks of whole steps. A verdict other than \u201cno difference "
        "seen\u201d needs an interval that excludes no change, after allowing for the number of "
        "metrics that were looked at.",
    ),
    (
        "source",
        "What saw the work: events (on device streams), host (the host's clock), kineto, "
        "rocprofv3 or nsys (kernel traces), projected (a model). A statistic uses one source.",
    ),
    (
        "not measured",
        "A number that was not measured is shown as n/a with its reason, never as 0.",
    ),
)

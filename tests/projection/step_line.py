"""A line of steps.jsonl, as the harness of one-GPU steps writes it."""

STEP = {
    "name": "tiny",
    "world": 1,
    "dp": 1,
    "tp": 1,
    "ep": 1,
    "mbs": 1,
    "seq": 4096,
    "grad_accum": 1,
    "compile": False,
    "model": {"h": 4096, "f": 14336, "nh": 32, "nkv": 8, "V": 128256, "L": 6},
    "step_ms": 95.0,
    "tok_s_gpu": 43000.0,
}
"""A line of steps.jsonl."""

"""Published rows that were in view when factors were fitted; all others are held out."""

from typing import Any

PUBLISHED_ROWS = (
    "e0", "e2", "e3", "c0", "c2", "c3", "t0", "h1", "a1", "a2", "m0", "m2", "m4", "m7", "m8", "m9",
    "kt-175b-full", "kt-175b-selective", "i7-a100", "kt-n-1t-full", "kt-n-1t-selective", "fa1-8", "fa70-64",
    "bg175-2502", "e8-b200", "b8-2502", "bn15-2502", "bn340-2502", "eq235-b200-256", "eq235-b200-64",
    "eq30-b200", "e70-gb200-fp4", "e70-gb200-mx", "elora-gb200", "esft-gb200", "e8-gb200", "e405-gb200",
    "e405-gb200-mx", "gmx22-2504", "gmx7-2504", "gn340-2504", "e70-gb300-fp4", "e70-gb300-mx", "e405-gb300",
    "e405-gb300-b", "e405-gb300-fp4", "e405-gb300-mx", "eq30-gb300", "dg175-bf16-128", "dg175-bf16-2048",
    "dg175-bf16-512", "dg175-fp8-128", "dg175-fp8-2048", "dg175-fp8-512", "hg175-2502", "mlp-11616", "ng5",
    "i7-h100", "nl2-7", "nlora7", "nsft7", "nl3-8", "jlora8", "da405-bf16-1152", "da405-bf16-2304",
    "da405-bf16-576", "da405-fp8-1152", "da405-fp8-2304", "da405-fp8-576", "t8cp1", "t8cp2", "t8cp4",
    "t8cp8", "fh13-16k", "fh13-32k", "fh13-8", "fh1-8", "fh7-32k", "fh7-512", "fh7-64k", "fh7-8", "fh7-8k",
    "dn15-bf16-128", "dn15-bf16-16", "dn15-bf16-2048", "dn15-fp8-128", "dn15-fp8-16", "dn15-fp8-2048",
    "dn340-bf16-128", "dn340-bf16-2048", "dn340-bf16-512", "dn340-fp8-128", "dn340-fp8-2048",
    "dn340-fp8-512", "jloraq7", "eq30-h100", "jq30", "k1", "k2", "k3", "k4", "k5", "k6", "r70-MI300X",
    "r70-MI325X",
)  # fmt: skip

FITTED_ON: dict[str, Any] = {
    "kernels": "measured sheets and published single numbers, see aorta/hardware/parts/vendor",
    "steps": "gemm, contention_compute and dtensor_launch_s by `calibrate` on runs of one and two H200; runs "
    "of four are held out, but for fsdp_dtensor_unit_s: only they combine FSDP and tp, it is set from one",
    "trace": "memory shares and contention_communication from one trace of FSDP2 on four H200 (an 8B of four "
    "layers, not among the steps)",
    "published": PUBLISHED_ROWS,
    "published_note": "the factors of fitted.py, each shared by a part and data type or by a framework's "
    "releases; all complete rows of both tables were in view, and none of them is held out. Rows of other "
    "tables are, and leave_one_group_out says what the factors are worth without a group",
}
"""Data that the factors of steps were fitted to; everything else is held out."""

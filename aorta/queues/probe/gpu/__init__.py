"""The probe's kernels on a GPU: Triton's or the driver's, and the machine that launches them."""

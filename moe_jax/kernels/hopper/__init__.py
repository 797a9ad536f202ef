"""Building blocks of the kernels for Hopper GPUs, shared by the experts' and by attention's kernels."""

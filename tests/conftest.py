"""What every test runs under."""

import jax

# Tests compare f32 with f32 and f64; on an NVIDIA GPU XLA multiplies f32 matrices in TF32 unless told otherwise.
jax.config.update("jax_default_matmul_precision", "highest")

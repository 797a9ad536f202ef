"""Steps around the kernels of the experts, as whole programs. Their operations one by one would be hundreds of programs."""

import jax

from moe_jax.kernels.experts import routing
from moe_jax.kernels.experts.fp8 import quantise

plan, plan_of_few = (jax.jit(make, static_argnums=(1, 2)) for make in (routing.plan, routing.plan_of_few))
quantise_matrices, quantise_rows = map(jax.jit, (quantise.quantise_matrices, quantise.quantise_rows))

"""The experts' matmuls in 8 bits: activations with one scale per 128 elements, weights with one per 128 x 128 block."""

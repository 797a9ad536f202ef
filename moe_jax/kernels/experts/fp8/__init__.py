"""The experts' matmuls in 8 bits: activations with a scale for 128 numbers, weights with a scale for a block of 128 x 128."""

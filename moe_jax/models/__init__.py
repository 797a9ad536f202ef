"""The model architectures, one file each, read from top to bottom like their papers."""

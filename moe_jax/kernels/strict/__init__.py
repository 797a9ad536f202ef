"""Kernels whose results for a row have the same bits for any number of other rows."""

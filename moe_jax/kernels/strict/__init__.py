"""Kernels whose results for a row have the same bits beside any other rows, however many there are."""

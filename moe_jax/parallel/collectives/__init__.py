"""Sums, gathers and transfers between devices, in one order of summation."""

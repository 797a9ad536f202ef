"""Sequences split over devices: layouts of tokens, ring attention, and attention of what a device holds."""

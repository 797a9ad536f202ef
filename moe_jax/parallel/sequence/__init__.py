"""Sequences split over devices: layouts of tokens, ring attention, and attention of the tokens that a device holds."""

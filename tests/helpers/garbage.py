"""Python's search for garbage, which is off from the import of this module until `search_rarely`.

What imports and collection make stays. A fifth of the time of collection went into searches of it.
"""

import gc

gc.disable()


def search_rarely():
    """Searches for garbage from now on, in what tests make alone, and rarely: a trace makes millions of objects that stay."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()

"""Flash attention for Hopper GPUs (Pallas Mosaic GPU): forward, backward over keys, backward over queries."""

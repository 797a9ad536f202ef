"""Parts of every run: shared settings, the loop, its log, the best step, and the files in a run's folder."""

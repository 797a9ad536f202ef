"""Fine-tuning: settings, checks before the weights are read, the loop, and what a run's folder holds."""

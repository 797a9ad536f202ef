"""Fine-tuning: settings, checks before the weights are read, and the loop."""

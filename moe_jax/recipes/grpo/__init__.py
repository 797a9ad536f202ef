"""Reinforcement learning: settings, checks before the weights are read, the rollout of a step, and the loop."""

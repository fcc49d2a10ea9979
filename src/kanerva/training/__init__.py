"""Optimiser, schedule, checkpoints, one step and the loop around it."""

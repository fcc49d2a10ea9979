"""Fused kernels for GPUs; on other devices plain operations compute the same."""

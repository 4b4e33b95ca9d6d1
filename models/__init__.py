"""Decoders in Flax, and how checkpoints map to their parameters."""

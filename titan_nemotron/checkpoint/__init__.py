"""Checkpoints of a training run, and model files in Hugging Face's format."""

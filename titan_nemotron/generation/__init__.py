"""Decoding caches, sampling, batched generation and scoring."""

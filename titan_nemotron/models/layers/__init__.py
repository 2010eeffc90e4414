"""Layers that model families are built of."""

"""Optimizers, schedules, and the balancing of routers."""

"""The learning rate as a pure function of the step."""

import math

from titan_nemotron.optim.config import ScheduleConfig


def learning_rate(config: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 1, of a run of `total_steps`.

    Warmup, t <= W:  peak * t / W. Afterwards min + (peak - min) * f(x) with min = min_ratio * peak and x the share of the
    decay that has passed: the decay covers W to T, or for wsd the last decay_steps of that. f falls from 1 to 0:
    linear 1 - x, cosine (1 + cos(pi x)) / 2, minus_sqrt 1 - sqrt(x). After T it is min (constant: peak).
    Equal to Megatron-LM's OptimizerParamScheduler at its counter value `step`.
    """
    if step <= config.warmup_steps and config.warmup_steps > 0:
        return peak * step / config.warmup_steps
    if config.kind == "constant":
        return peak
    decay_steps = total_steps - config.warmup_steps
    if config.kind == "wsd":
        decay_steps = min(decay_steps, config.decay_steps)
    shape = config.decay_shape if config.kind == "wsd" else config.kind
    passed = step - (total_steps - decay_steps)
    x = min(1.0, max(0.0, passed / decay_steps)) if decay_steps > 0 else 1.0
    match shape:
        case "linear":
            share = 1.0 - x
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * x))
        case _:
            share = 1.0 - math.sqrt(x)
    minimum = config.min_ratio * peak
    return minimum + (peak - minimum) * share

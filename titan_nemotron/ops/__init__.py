"""Functions on tensors. Each has one public entry, a plain reference, and a fast path chosen by device."""

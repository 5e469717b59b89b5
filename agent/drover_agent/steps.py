"""Deprecated name of `drover_agent.client.training_steps`, kept for training loops until release 0.3."""

from __future__ import annotations

import warnings

from drover_agent.client.training_steps import Reporter, transformer_flops

__all__ = ["Reporter", "transformer_flops"]

warnings.warn(
    "drover_agent.steps is now drover_agent.client.training_steps; the old name goes with release 0.3",
    DeprecationWarning,
    stacklevel=2,
)

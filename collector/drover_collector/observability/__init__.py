"""Drover's own health: the metrics page, the self check, the dead man's switch."""

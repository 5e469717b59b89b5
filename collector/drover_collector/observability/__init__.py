"""Drover about itself: the metrics page, its self check, the dead man's switch."""

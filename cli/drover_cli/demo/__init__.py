"""The parts of `drover demo`."""

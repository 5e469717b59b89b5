"""Detect silent nodes, lost GPUs, hung drivers and wrong clocks."""

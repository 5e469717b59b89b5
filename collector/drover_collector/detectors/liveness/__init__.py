"""Silent nodes, lost GPUs, hung drivers, wrong clocks."""

"""The commands of `drover-agent` besides `run`."""

"""The collector: takes telemetry in, finds what is wrong, decides, acts, notifies, answers."""

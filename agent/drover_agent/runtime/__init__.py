"""Run one agent: what it sends, NVML, the kernel log, reports to systemd, restarts."""

"""How one agent runs: the NVIDIA driver it holds, its restarts, what systemd hears of it."""

"""Which nodes are probed when, and what holds them free for it."""

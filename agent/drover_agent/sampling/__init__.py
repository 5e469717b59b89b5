"""The schedule of all sources, and threads that can be abandoned when a read hangs."""

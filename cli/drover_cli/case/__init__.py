"""Case folders: read, written, imported."""

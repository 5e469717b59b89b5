"""The kernel log: XIDs and other lines that are events."""

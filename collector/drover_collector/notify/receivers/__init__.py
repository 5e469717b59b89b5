"""Receivers of notifications, a file each."""

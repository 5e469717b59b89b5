"""Whole files, backups, retention and room on the disk."""

"""The fleet's certificates: the authority, and how nodes enrol."""

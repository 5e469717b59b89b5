"""Incidents: findings that belong together, with a life, and the health that follows. Pure."""

"""Policy and guard: what is done about an incident, and how much may be out of service."""

"""The values that programs exchange and store: events, findings, incidents, decisions, actions, the fleet."""

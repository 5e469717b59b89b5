"""The fleet's series for other systems: Prometheus pages, remote_write, OTLP; audit and security events for syslog."""

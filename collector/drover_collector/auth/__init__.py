"""Who may connect and call what: certificates, roles, limits of connections."""

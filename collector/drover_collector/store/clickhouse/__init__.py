"""ClickHouse: the embedded engine or a server, one code path after opening."""

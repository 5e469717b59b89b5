"""ClickHouse: the embedded engine or a server, behind one class of clients."""

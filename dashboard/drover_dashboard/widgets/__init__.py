"""What pages are made of: tables, charts, the picture of the fleet."""

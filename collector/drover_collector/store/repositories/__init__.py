"""Tables of everything that is not a sample: a class for each table."""

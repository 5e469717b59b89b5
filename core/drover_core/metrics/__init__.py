"""The metric catalogue: one row for each metric, with its unit, kind and help."""

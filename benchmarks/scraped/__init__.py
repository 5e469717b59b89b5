"""A simulated fleet as exporters' pages, served over HTTP."""

"""A validation of nodes before they serve: stages of probes, how their figures are judged, and a report to sign."""

"""Detect network ports, leaf switches, NVLinks and PCIe links that fail or degrade."""

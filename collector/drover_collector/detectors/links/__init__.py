"""Network ports, leaf switches, NVLink and PCIe that fail or degrade."""

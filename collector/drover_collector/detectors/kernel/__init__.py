"""Kernel-log lines that are no XIDs: PCIe, memory, CPU, drives, adapters."""

"""GPUs through NVML, the library of the NVIDIA driver."""

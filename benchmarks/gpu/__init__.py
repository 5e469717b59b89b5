"""Parts of `bench_gpu.py`."""

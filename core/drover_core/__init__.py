"""What all programs of Drover share.

The model, metrics, XIDs, settings, times, certificates, logs. It needs only the standard library.
"""

VERSION = "0.2.0"  # as in pyproject.toml; asking importlib.metadata for it costs an agent 3 MiB

"""The contract all sides of Drover share: metrics, XIDs, events, topology, the wire. Needs stdlib, protobuf, grpc."""

VERSION = "0.1.0"  # as in pyproject.toml; asking importlib.metadata for it costs an agent 3 MiB

"""The contract all sides of Drover share: metrics, XIDs, events, topology, the wire. Needs stdlib, protobuf, grpc."""

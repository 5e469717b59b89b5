"""The contract all sides of Drover share: metrics, XIDs, events, topology and the wire. Imports stdlib, protobuf, grpc."""

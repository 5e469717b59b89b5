"""The wire: the .proto files, what is generated of them, and the packing of blocks."""

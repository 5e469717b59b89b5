"""The wire: the .proto files, the modules generated from them, and the packing of blocks."""

"""Converts between the protobuf contract and the types of the core."""

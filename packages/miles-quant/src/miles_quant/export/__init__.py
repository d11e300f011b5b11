"""Weights on their way to an engine: packed shards, and digests that the receiving side checks."""

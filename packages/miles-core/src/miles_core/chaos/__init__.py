"""Runs of scripted parts that break on purpose, on a virtual clock, and the invariants that they must keep."""

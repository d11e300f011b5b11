"""Runs whose processes are scripts that break on purpose, on a virtual clock, and what they must keep all the same."""

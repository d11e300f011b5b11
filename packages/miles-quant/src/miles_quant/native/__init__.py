"""Compiled kernels for the CPU, equal to the formats bit for bit."""

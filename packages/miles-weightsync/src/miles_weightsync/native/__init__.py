"""Compiled kernels for the CPU, equal to the numpy code of `delta` bit for bit."""

"""Checkpoints of any backend: blocks of tensors in safetensors files, complete or absent."""

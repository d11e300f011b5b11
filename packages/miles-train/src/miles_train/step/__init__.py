"""One optimizer step, as far as no backend has a say in it: rows, inputs, losses, checks, sizes."""

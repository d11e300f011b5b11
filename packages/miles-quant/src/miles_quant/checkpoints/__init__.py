"""Model folders in and out of low precision, streaming."""

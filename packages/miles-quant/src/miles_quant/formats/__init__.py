"""Number formats, each in a small file: how a matrix becomes codes and scales, and back."""

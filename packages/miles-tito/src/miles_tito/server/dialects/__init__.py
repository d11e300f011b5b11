"""Wire dialects of chat clients."""

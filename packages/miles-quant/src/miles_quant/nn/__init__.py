"""Training against the engine's numbers: modules whose forward pass is what the engine computes from its bytes."""

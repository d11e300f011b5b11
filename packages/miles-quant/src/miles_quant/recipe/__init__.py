"""Which tensors a format applies to, and how Hugging Face folders say so."""

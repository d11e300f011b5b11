"""SmolLM2, and any plain ChatML model without reasoning; its template lists no tools."""

from .base import Family

FAMILY = Family(name="smollm2", close="<|im_end|>")

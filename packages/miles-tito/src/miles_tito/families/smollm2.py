"""SmolLM2: plain ChatML without reasoning; its template lists no tools."""

from .base import Family

FAMILY = Family(name="smollm2", close="<|im_end|>")

"""GLM-4.5 to GLM-5: a turn ends with the token that opens the next message, which the model samples itself."""

from .base import Family
from .calls import PAIRS

FAMILY = Family(
    name="glm",
    close="",
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    openers=("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
    reasoning=("<think>", "</think>"),
    tool_call=PAIRS,
)

"""gpt-oss: harmony. A reply ends with `<|return|>`, a call with `<|call|>`; a message in between with `<|end|>`."""

from .base import Family

FAMILY = Family(
    name="gpt-oss",
    close="<|end|>",
    stops=("<|return|>", "<|call|>"),
    channels="harmony",
    late_system="fold",  # its template drops them
    reasoning_field="thinking",
)

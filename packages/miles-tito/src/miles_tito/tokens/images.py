"""Images in messages: hashed, counted in tokens, and carried beside the ids as they came.

A normalized message keeps its text as text; its images stand in `images`, each with the place in the text where it
belongs. The template writes one placeholder an image, which becomes as many as the image has tokens.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from miles_tito.errors import MissingDependency, RequestError, TemplateError
from miles_tito.records import Message

ImageCounter = Callable[[str], int]
"""From an image's URL to the number of tokens that it takes."""


def read_part(part: dict[str, Any], at: int, where: str) -> dict[str, Any]:
    """An OpenAI image part as `{url, digest, at}`.

    Raises:
        RequestError: no URL, or a data URL that cannot be decoded.
    """
    image = part.get("image_url", part.get("image"))
    url = cast("dict[str, Any]", image).get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not url:
        raise RequestError(
            f"{where} is an image without a URL; send {{'type': 'image_url', 'image_url': {{'url': 'data:…'}}}}.",
            code="unsupported_content",
            param=where,
        )
    digest = hashlib.sha256(_bytes(url, where) if url.startswith("data:") else url.encode()).hexdigest()
    return {"url": url, "digest": digest, "at": at}


def parts_of(message: Message) -> str | list[dict[str, Any]]:
    """The content of a normalized message as templates take it: text, or parts in their order."""
    text: str = message["content"]
    images = cast("list[dict[str, Any]]", message.get("images", []))
    if not images:
        return text
    parts: list[dict[str, Any]] = []
    start = 0
    for image in images:
        if text[start : image["at"]]:
            parts.append({"type": "text", "text": text[start : image["at"]]})
        parts.append({"type": "image"})
        start = image["at"]
    return [*parts, *([{"type": "text", "text": text[start:]}] if text[start:] else [])]


def joined(first: Message, second: Message, between: str) -> Message:
    """Two messages of one role as one."""
    text = first["content"] + between
    images = [*first.get("images", []), *({**i, "at": i["at"] + len(text)} for i in second.get("images", []))]
    return {**first, "content": text + second["content"], **({"images": images} if images else {})}


def expand(ids: np.ndarray, placeholder: int, counts: Sequence[int]) -> np.ndarray:
    """`ids` with the n-th `placeholder` written `counts[n]` times.

    Raises:
        TemplateError: there are more or fewer placeholders than images.
    """
    at = np.flatnonzero(ids == placeholder)
    if len(at) != len(counts):
        raise TemplateError(
            f"The chat template writes {len(at)} placeholders for {len(counts)} images; this model's template takes "
            "no images."
        )
    repeats = np.ones(len(ids), np.int64)
    repeats[at] = counts
    return np.repeat(ids, repeats)


def runs(ids: np.ndarray, placeholder: int, counts: Sequence[int]) -> list[int]:
    """Where each image begins in ids that `expand` made."""
    starts: list[int] = []
    at = np.flatnonzero(ids == placeholder)
    taken = 0
    for count in counts:
        starts.append(int(at[taken]))
        taken += count
    return starts


@functools.lru_cache(maxsize=8)
def counter_for(folder: str) -> ImageCounter:
    """Counts tokens as the image processor in a model folder does (Qwen-VL: patches over the merged square).

    Raises:
        TemplateError: the folder has no image processor.
        MissingDependency: Transformers or Pillow is absent.
    """
    if not (Path(folder) / "preprocessor_config.json").is_file():
        raise TemplateError(f"{folder} has no `preprocessor_config.json`; the model in it takes no images.")
    try:
        import PIL.Image
        import transformers
    except ImportError as error:
        raise MissingDependency("Images need Transformers and Pillow: pip install 'miles-tito[hf]'.") from error
    processor = cast("Any", transformers).AutoImageProcessor.from_pretrained(folder)

    @functools.lru_cache(maxsize=4096)
    def count(url: str) -> int:
        if not url.startswith("data:"):
            raise TemplateError(f"Images come as data URLs; a session fetches nothing: {url[:80]!r}.")
        image = PIL.Image.open(io.BytesIO(_bytes(url, "image"))).convert("RGB")
        grid = cast("np.ndarray", processor(images=[image], return_tensors="np")["image_grid_thw"])
        return int(grid.prod()) // int(processor.merge_size) ** 2

    return count


def _bytes(url: str, where: str) -> bytes:
    try:
        return base64.b64decode(url.partition("base64,")[2], validate=True)
    except ValueError as error:  # binascii.Error, or text that is not ASCII
        raise RequestError(
            f"{where}: the data URL is no base64: {error}.", code="unsupported_content", param=where
        ) from error

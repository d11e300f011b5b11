"""Images in messages: counted, hashed, found again, and carried beside the tokens."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_tito import RequestError, Session, TemplateError, Tokenizer, to_samples
from miles_tito.engine.generation import Generation, one_version
from miles_tito.records import Episode, FinishReason, Outcome
from miles_tito.tokens.families import FAMILIES, Family
from miles_tito.tokens.families.base import ImageFormat
from miles_tito.tokens.images import counter_for
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import message_key, normalize
from models_at_hand import stand_in

TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' ~ message.role ~ '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
FAMILY = Family(name="sees", close="<|im_end|>", image=ImageFormat(placeholder="<|image_pad|>"))


def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(
        stand_in(CONTROLS), special_tokens={"eos_token": "<|im_end|>"}, template_sources={"default": template}
    )


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def shows(*parts: str | bytes) -> dict[str, Any]:
    """A user message of texts and images."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in parts
        ],
    }


def length_of(url: str) -> int:
    """An image takes a token a byte."""
    return len(base64.b64decode(url.partition("base64,")[2]))


def reply_to(session: Session, messages: list[dict[str, Any]], rid: str) -> Any:
    plan = session.plan(normalize(messages))
    turn = session.begin(plan, session.encode(plan), rid=rid)
    ids = np.append(session.joiner.tokenizer.encode("fine"), np.int32(session.joiner.close_id or 0))
    turn.reader.feed(ids)
    turn.reader.finish()
    length = len(ids)
    session.commit(
        turn,
        Generation(
            output_ids=ids,
            logprobs=np.full(length, -1.0, np.float32),
            versions=one_version(length, 1),
            finish_reason=FinishReason.STOP,
        ),
    )
    return turn


@pytest.fixture
def session() -> Session:
    return Session("s", Joiner(tokenizer(), FAMILY, count_images=length_of), max_context=4096)


def test_each_image_has_as_many_placeholders_as_tokens(session: Session):
    turn = reply_to(session, [shows("see ", b"abc", " and ", b"wxyz!", "?")], "r0")
    pad = session.joiner.tokenizer.token_id("<|image_pad|>")
    at = np.flatnonzero(turn.request.input_ids == pad)
    assert len(at) == 3 + 5
    assert turn.request.images == (data_url(b"abc"), data_url(b"wxyz!"))
    text = session.joiner.tokenizer.decode(turn.request.input_ids)
    assert "see " in text
    assert " and " in text


def test_images_are_carried_to_the_sample_with_their_place(session: Session):
    first = [shows("see ", b"abc")]
    reply_to(session, first, "r0")
    history = [*first, {"role": "assistant", "content": "fine"}, shows(b"wxyz!", "and this?")]
    turn = reply_to(session, history, "r1")
    assert turn.request.images == (data_url(b"abc"), data_url(b"wxyz!"))
    (trajectory,) = session.trajectories()
    assert trajectory.multimodal
    pad = session.joiner.tokenizer.token_id("<|image_pad|>")
    for image in trajectory.multimodal["images"]:
        run = slice(image["start"], image["start"] + image["num_tokens"])
        assert (trajectory.tokens[run] == pad).all()
        assert not trajectory.loss_mask[run].any()
    assert [image["num_tokens"] for image in trajectory.multimodal["images"]] == [3, 5]
    episode = Episode(
        id="e", prompt_id="p", group_id="g", outcome=Outcome.GRADED, reward=1.0, trajectories=(trajectory,)
    )
    assert to_samples(episode, 1.0)[0].multimodal == trajectory.multimodal


def test_another_image_is_another_history(session: Session):
    first = [shows("see ", b"abc")]
    reply_to(session, first, "r0")
    reply_to(session, [shows("see ", b"abd"), {"role": "assistant", "content": "fine"}, shows("and?")], "r1")
    assert len(session.trajectories()) == 2


def test_the_same_bytes_and_place_are_the_same_message():
    one, same, moved = (
        normalize([shows("see ", b"abc")])
        + normalize([shows("s", "ee ", b"abc")])
        + normalize([shows("see", b"abc", " ")])
    )
    assert message_key(one) == message_key(same) != message_key(moved)


def test_a_placeholder_in_text_is_text(session: Session):
    turn = reply_to(session, [shows("<|image_pad|> and ", b"abc")], "r0")
    pad = session.joiner.tokenizer.token_id("<|image_pad|>")
    assert (turn.request.input_ids == pad).sum() == 3


@pytest.mark.parametrize("name", ["gemma-3", "smollm2", "gpt-oss"])
def test_a_family_without_images_says_so(name: str):
    joiner = Joiner(tokenizer(), Family(name=name, close="<|im_end|>", image=FAMILIES[name].image))
    session = Session("s", joiner, max_context=4096)
    with pytest.raises(RequestError, match=f"Family {name} takes no images") as caught:
        session.encode(session.plan(normalize([shows(b"abc")])))
    assert caught.value.status == 400


def test_a_template_that_drops_images_is_refused():
    dropping = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    joiner = Joiner(tokenizer(dropping), FAMILY, count_images=length_of)
    session = Session("s", joiner, max_context=4096)
    plan = session.plan(normalize([shows(b"abc")]))
    with pytest.raises(RequestError, match="writes 0 placeholders for 1 images"):
        session.encode(plan)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image_url", "image_url": {}}, "an image without a URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}}, "no base64"),
        ({"type": "input_audio"}, "'input_audio' part"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused(part: dict[str, Any], why: str):
    with pytest.raises(RequestError, match=why):
        normalize([{"role": "user", "content": [part]}])


def test_an_assistant_shows_no_images():
    image = {"type": "image_url", "image_url": {"url": data_url(b"abc")}}
    with pytest.raises(RequestError, match="assistant messages take text parts only"):
        normalize([{"role": "user", "content": "q"}, {"role": "assistant", "content": [image]}])


@pytest.fixture
def qwen_vl_folder(tmp_path: Path) -> Path:
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    sizes = {"min_pixels": 56 * 56, "max_pixels": 1280 * 28 * 28, "temporal_patch_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, **sizes}))
    return tmp_path


@pytest.mark.parametrize(("width", "height", "tokens"), [(280, 140, 50), (56, 56, 4), (140, 56, 10)])
@pytest.mark.filterwarnings("ignore")
def test_tokens_are_counted_as_qwen_vl_merges_patches(width: int, height: int, tokens: int, qwen_vl_folder: Path):
    pytest.importorskip("transformers")
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("RGB", (width, height), (200, 10, 10)).save(file, "PNG")
    try:
        count: Callable[[str], int] = counter_for(str(qwen_vl_folder))
    except ImportError as error:
        pytest.skip(f"the image processor cannot be loaded: {error}")
    assert count(data_url(file.getvalue())) == tokens


def test_a_folder_without_an_image_processor_is_refused(tmp_path: Path):
    with pytest.raises(TemplateError, match=r"no `preprocessor_config\.json`"):
        counter_for(str(tmp_path))

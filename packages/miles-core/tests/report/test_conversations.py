from __future__ import annotations

import json

import numpy as np
from miles_core.report.conversations import HEAD, TAIL, token_strip, token_text
from miles_core.report.page import embedded
from miles_core.text import visible
from miles_tito.records import Trajectory, VersionSpan
from tokenizers import Tokenizer, decoders, models


def tokenizer(*texts: str, decoder=None) -> Tokenizer:
    made = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    made.decoder = decoder or decoders.Fuse()
    return made


def trajectory(mask, logprobs=None, versions=None) -> Trajectory:
    sampled = [i for i, m in enumerate(mask) if m]
    return Trajectory(
        id="t",
        tokens=np.arange(len(mask)) % 4,
        loss_mask=np.array(mask, dtype=bool),
        logprobs=np.array([0.0] * len(mask) if logprobs is None else logprobs, dtype=np.float32),
        versions=versions or ((VersionSpan(start=sampled[0], end=sampled[-1] + 1, version=3),) if sampled else ()),
    )


def tokens_of(blocks) -> list[list]:
    return [item for block in blocks for item in block["items"] if isinstance(item, list)]


def test_each_author_has_a_block_and_only_sampled_tokens_are_shaded():
    blocks = token_strip(trajectory([False, True, True, False, True]), tokenizer("p", "a", "b", "e"))
    assert [block["author"] for block in blocks] == ["prompt", "policy", "environment", "policy"]
    assert [item for item in tokens_of(blocks) if len(item) == 2] == [[0, "p"], [3, "e"]]
    assert [level for _, _, _, level in (item for item in tokens_of(blocks) if len(item) == 4)] == [0, 0, 0]


def test_the_less_likely_the_darker_and_the_pointer_finds_id_logprob_and_version():
    logprobs = [-0.01, -0.2, -1.0, -2.0, -9.0]
    (block,) = token_strip(trajectory([True] * 5, logprobs), tokenizer("p", "a", "b", "e"))
    version, *items = block["items"]
    assert [item[3] for item in items] == [0, 1, 2, 3, 4]
    assert (version, items[2]) == ("v3", [2, "b", -1.0, 2])


def test_a_new_weight_version_is_marked_where_it_begins():
    spans = (VersionSpan(start=1, end=3, version=3), VersionSpan(start=3, end=5, version=4))
    blocks = token_strip(trajectory([False, True, True, True, True], versions=spans), tokenizer("p", "a", "b", "e"))
    marked = [item if isinstance(item, str) else item[1] for block in blocks for item in block["items"]]
    assert marked == ["p", "v3", "a", "b", "v4", "e", "p"]


def test_a_long_trajectory_shows_its_ends_and_says_how_much_is_missing():
    blocks = token_strip(trajectory([False] * 10 + [True] * 3000), None)
    assert len(tokens_of(blocks)) == HEAD + TAIL
    left_out = [item for block in blocks for item in block["items"] if isinstance(item, int)]
    assert left_out == [3010 - HEAD - TAIL]


def test_what_hides_or_reorders_text_is_made_visible():
    assert visible("a\tb\nc d") == "a\\u0009b⏎\nc d"
    assert visible("x\u202ey\u200bz\x00") == "x\\u202ey\\u200bz\\u0000"
    assert visible("naïve 漢字 🙂") == "naïve 漢字 🙂"
    texts = ["a\tb\nc d", "x\u202ey\u200bz\x00", "naïve 漢字 🙂"]
    assert json.loads(embedded(texts)) == [visible(text) for text in texts]


def test_the_space_that_a_decoder_drops_at_the_start_of_a_text_is_kept():
    spm = tokenizer("▁The", "▁ox", "en", decoder=decoders.Metaspace())
    assert [token_text([0, 1, 2], i, spm) for i in range(3)] == ["The", " ox", "en"]

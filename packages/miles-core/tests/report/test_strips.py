from __future__ import annotations

import re

import numpy as np
from miles_core.report.strips import HEAD, TAIL, pieces, token_strip
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


def test_each_author_has_a_block_and_only_sampled_tokens_are_shaded():
    html = token_strip(trajectory([False, True, True, False, True]), tokenizer("p", "a", "b", "e"))
    assert re.findall(r'class="turn (\w+)"', html) == ["prompt", "policy", "environment", "policy"]
    assert html.count('class="t l0"') == 3
    assert html.count('class="t"') == 2


def test_the_less_likely_the_darker_and_the_pointer_finds_id_logprob_and_version():
    logprobs = [-0.01, -0.2, -1.0, -2.0, -9.0]
    html = token_strip(trajectory([True] * 5, logprobs), tokenizer("p", "a", "b", "e"))
    assert re.findall(r"t l(\d)", html) == ["0", "1", "2", "3", "4"]
    assert 'data-t="2|-1.0000|v3"' in html


def test_a_new_weight_version_is_marked_where_it_begins():
    spans = (VersionSpan(start=1, end=3, version=3), VersionSpan(start=3, end=5, version=4))
    html = token_strip(trajectory([False, True, True, True, True], versions=spans), tokenizer("p", "a", "b", "e"))
    assert re.findall(r'<b class="v">(\w+)</b>', html) == ["v3", "v4"]
    assert html.index(">b</i>") < html.index(">v4<") < html.index(">e</i>")


def test_a_long_trajectory_shows_its_ends_and_says_how_much_is_missing():
    html = token_strip(trajectory([False] * 10 + [True] * 3000), None)
    assert html.count('<i class="t') == HEAD + TAIL
    assert f"… {3010 - HEAD - TAIL} tokens left out …" in html


def test_what_hides_or_reorders_text_is_made_visible():
    assert visible("a\tb\nc d") == "a\\u0009b⏎\nc d"
    assert visible("x\u202ey\u200bz\x00") == "x\\u202ey\\u200bz\\u0000"
    assert visible("naïve 漢字 🙂") == "naïve 漢字 🙂"


def test_the_space_that_a_decoder_drops_at_the_start_of_a_text_is_kept():
    spm = tokenizer("▁The", "▁ox", "en", decoder=decoders.Metaspace())
    assert pieces([0, 1, 2], spm) == ["The", " ox", "en"]

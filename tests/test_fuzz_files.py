"""Damaged config, index and tokenizer files: each works, or is refused in one line with its file and key.

FUZZ_EXAMPLES=20000 makes so many random files for each test.
"""
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import convert_gguf_checkpoint
import convert_hf_checkpoint
import model
from model import ModelConfig, rope_frequencies
from tokenizer import load_tokenizer

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
fuzz = settings(max_examples=EXAMPLES, deadline=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([64, 2**31, 2**63, -2**63, 10**400]),
                    st.floats(), st.sampled_from([0.0, -0.0, 1.0, 64.0, 0.5, 1e-5, 1e308]))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4),
                   st.sampled_from(["64", "default", "<s>", "{% if %}", "{{ 1 // 0 }}", "\ud800", "a\nb"]))
VALUES = st.recursive(LEAVES, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)), max_leaves=6)
NESTED = st.integers(900, 1100).map(lambda depth: "[" * depth + "]" * depth)  # about what Python recurses

CONFIG = {"model_type": "llama", "hidden_act": "silu", "architectures": ["LlamaForCausalLM"],
          "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2,
          "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "max_position_embeddings": 128, "tie_word_embeddings": False, "attention_bias": False,
          "mlp_bias": False}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def changed(draw: Callable, entries: dict, more: list[str], values: st.SearchStrategy = VALUES) -> dict:
    """A copy in which up to three entries, or others named in `more`, are dropped or replaced."""
    entries = copy.deepcopy(entries)
    for key in draw(st.lists(st.sampled_from([*entries, *more]), max_size=3)):
        if draw(st.booleans()) and draw(st.booleans()):
            entries.pop(key, None)
        else:
            entries[key] = draw(values)
    return entries


@st.composite
def configs(draw: Callable) -> dict:
    entries = changed(draw, CONFIG, [*model.NEUTRAL, "factor", "sliding_window", "layer_types", "own_key"])
    if draw(st.booleans()):
        entries[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = changed(
            draw, ROPE, ["type", "beta_fast", "partial_rotary_factor", "full_attention"])
    return entries


@st.composite
def files(draw: Callable, entries: st.SearchStrategy) -> bytes:
    """A file's bytes: mostly `entries`; else other JSON, text deeper than Python recurses, or no JSON."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(st.binary(max_size=30))
    if kind == 1:
        return draw(NESTED).encode()
    contents = json.dumps(draw(VALUES if kind == 2 else entries)).encode()
    if kind == 3:
        return contents[:draw(st.integers(0, len(contents)))]
    if kind == 4:
        return contents.replace(b": ", b": " + draw(NESTED).encode() + b', "twice": ', 1)
    return contents


def works_or_is_refused(call: Callable, path: Path, keys: set[str]) -> object:
    """The result, or None after a ValueError of one line that holds the path and, of an object, a key."""
    try:
        return call()
    except ValueError as e:
        message = str(e)
        assert len(message.splitlines()) == 1 and message.isprintable() and len(message) < 500, message
        assert path.name in message, message
        rest = message.replace(str(path), "")
        unread = ("JSON", "(char ", "codec can't", "digits", "recursion", "Git LFS", "cannot be used")
        assert any(key in rest for key in keys) or any(word in rest for word in unread), message
        return None


@fuzz
@given(contents=files(configs()))
def test_config(tmp_path, contents):
    path = tmp_path / "config.json"
    path.write_bytes(contents)
    keys = {*CONFIG, *ROPE, *model.NEUTRAL, "rope_scaling", "sliding_window", "layer_types"}
    config = works_or_is_refused(lambda: ModelConfig.from_json(path), path, keys)
    if config is not None and config.head_dim < 1000:
        assert len(config.notes.splitlines()) <= 1
        frequencies = rope_frequencies(config)  # [D/2]
        assert frequencies.shape == (config.head_dim // 2,) and torch.isfinite(frequencies).all()
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


NAMES = st.one_of(st.text(max_size=5), st.sampled_from(
    ["a.safetensors", "b.safetensors", "../a.safetensors", "/etc/passwd", "..", ".", "", "a\0", "n" * 300,
     "sub"]))
MAPS = st.dictionaries(st.text(max_size=4), st.one_of(NAMES, VALUES), max_size=3)
INDEXES = st.one_of(st.fixed_dictionaries({"weight_map": st.one_of(MAPS, VALUES)}), st.just({}))


@fuzz
@given(contents=files(INDEXES))
def test_index(tmp_path, contents):
    (tmp_path / "sub").mkdir(exist_ok=True)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").touch()
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(contents)
    shards = works_or_is_refused(lambda: convert_hf_checkpoint.find_shards(tmp_path), path, {"weight_map"})
    assert shards is None or {shard.name for shard in shards} <= {"a.safetensors", "b.safetensors"}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"])
def test_pointers_in_place_of_weights_are_called_so(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=f"{name}.*git lfs pull"):
        convert_hf_checkpoint.convert(tmp_path)


@pytest.mark.parametrize("index, message", [
    ({}, "weight_map"), ({"weight_map": []}, "weight_map"), ({"weight_map": {}}, "weight_map"),
    ({"weight_map": {"a": 1}}, "weight_map holds 1"), ({"weight_map": {"a": "gone"}}, '"gone" that'),
    ({"weight_map": {"a": "../model.pth"}}, "in this folder"), ([], "JSON")])
def test_a_wrong_index_is_refused_by_key(tmp_path, index, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message) as caught:
        convert_hf_checkpoint.convert(tmp_path)
    assert "model.safetensors.index.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("state", [[torch.ones(1)], {1: torch.ones(1)}, {"a": "b"}])
def test_a_bin_file_of_other_things_is_refused(tmp_path, state):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin.*more than tensors"):
        convert_hf_checkpoint.convert(tmp_path)


def test_damaged_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"<html>404</html>" * 9)
        with pytest.raises(ValueError, match=name):
            convert_hf_checkpoint.convert(tmp_path)


@pytest.mark.parametrize("contents, message", [(b"not found" * 20, "no GGUF"), (POINTER, "git lfs")])
def test_another_file_is_no_gguf(tmp_path, contents, message):
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(contents)
    with pytest.raises(ValueError, match=f"m.gguf.*{message}"):
        convert_gguf_checkpoint.convert(tmp_path / "m.gguf")


SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None, "pad_token": None,
            "add_bos_token": True, "added_tokens_decoder": {"3": {"content": "<x>", "special": True}},
            "chat_template": "{{ messages[0].content }}", "eos_token_id": [1, 2]}
OBJECTS = st.dictionaries(
    st.sampled_from(["content", "default", "3", "-3", "x"]),
    st.one_of(VALUES, st.fixed_dictionaries({"content": VALUES})), max_size=2)
TEMPLATES = st.lists(st.fixed_dictionaries({"name": LEAVES, "template": LEAVES}), max_size=2)


@st.composite
def settings_files(draw: Callable) -> dict:
    entries = changed(draw, SETTINGS, ["own_key"])
    for key in draw(st.lists(st.sampled_from(["bos_token", "added_tokens_decoder", "chat_template"]))):
        entries[key] = draw(st.one_of(OBJECTS, TEMPLATES))
    return entries


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tiny_checkpoint.with_name("tokenizer.json").read_bytes())
    return tmp_path


@fuzz
@given(contents=files(settings_files()))
@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "generation_config", "config"])
def test_files_beside_the_tokenizer(folder, name, contents):
    path = folder / f"{name}.json"
    path.write_bytes(contents)
    tokenizer = works_or_is_refused(lambda: load_tokenizer(folder), path, {*SETTINGS})
    if tokenizer is not None:
        assert tokenizer.decode(tokenizer.encode("ab", bos=False)) == "ab"
        assert all(type(i) is int and i >= 0 for i in tokenizer.stop_ids)
        turn = [{"role": "user", "content": "a"}]
        works_or_is_refused(lambda: tokenizer.chat(turn), Path("template"), {"chat"})


@fuzz
@given(contents=files(st.dictionaries(st.text(max_size=3), VALUES, max_size=3)))
def test_added_tokens(folder, contents):
    path = folder / "added_tokens.json"
    path.write_bytes(contents)
    tokenizer = works_or_is_refused(lambda: load_tokenizer(folder), path, {"an id"})
    assert tokenizer is None or tokenizer.decode(tokenizer.encode("ab", bos=False)) == "ab"


@fuzz
@given(data=st.data())
def test_tokenizer_json(folder, data):
    path = folder / "tokenizer.json"
    whole = path.read_bytes()
    spec = inner = json.loads(whole)
    while True:  # down to a random part
        key = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        if not isinstance(inner[key], (dict, list)) or not inner[key] or data.draw(st.booleans()):
            break
        inner = inner[key]
    inner[key] = data.draw(VALUES)
    path.write_bytes(json.dumps(spec).encode())
    try:
        tokenizer = works_or_is_refused(lambda: load_tokenizer(folder), path, set())
        assert tokenizer is None or isinstance(tokenizer.encode("ab"), list)
    finally:
        path.write_bytes(whole)

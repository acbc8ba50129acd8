"""config.json in, config.json out; rotary angles against transformers' own."""
import json
import re

import pytest
import torch
from conftest import tiny_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from load import CheckpointSource, load_checkpoint
from model import HARMLESS, KEYS, NEUTRAL, ModelConfig, RopeScaling, rope_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
FACTS = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3,
                                     LLAMA3 | {"factor": 8.0}, {"rope_type": "default"}])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_frequencies_are_those_of_transformers(scaling, key):
    facts = FACTS | {"rope_theta": 500000.0, "head_dim": 128, "max_position_embeddings": 131072}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**facts, rope_scaling=scaling))
    if key == "rope_parameters" and scaling is not None:
        facts = facts | {key: scaling | {"rope_theta": facts.pop("rope_theta")}}
    else:
        facts = facts | {key: scaling}
    freqs = rope_frequencies(ModelConfig.from_dict(facts))
    assert freqs.dtype == torch.float32
    torch.testing.assert_close(freqs, theirs.inv_freq, rtol=1e-6, atol=0)


def test_config_survives_a_round_trip():
    config = tiny_config(rope_scaling=RopeScaling.from_dict(LLAMA3), tie_word_embeddings=True, head_dim=20)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_defaults_are_those_of_the_format():
    config = ModelConfig.from_dict(FACTS)
    assert (config.n_kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (4, 16, 10000.0, 1e-6)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("change,message", [
    ({"model_type": "mamba"}, "mamba"), ({"hidden_act": "gelu"}, "gelu"),
    ({"architectures": ["LlamaModel"]}, "LlamaModel.*LlamaForCausalLM"),
    ({"num_key_value_heads": 3}, "multiple"), ({"head_dim": 15}, "head_dim 15"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"), ({"hidden_size": 66}, "head_dim"),
    ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor 4.0"),
    ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "attention_factor"),
    ({"rope_scaling": {"factor": 8.0}}, "'?default.*factor"),
    ({"rope_scaling": {"factor": 8.0, "type": "linear"}, "rope_parameters": LLAMA3}, "differ"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"), ({"rope_interleaved": True}, "rope_int"),
    ({"sliding_window": 512}, "sliding_window 512"), ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.*gptq.*original")])
def test_what_changes_the_result_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(FACTS | change)


@pytest.mark.parametrize("neutral", [
    {"partial_rotary_factor": 1.0}, {"rope_parameters": {"partial_rotary_factor": 1.0}},
    {"sliding_window": None}, {"sliding_window": 4096}, {"sliding_window": 512, "use_sliding_window": False},
    {"layer_types": ["full_attention"]}, {"quantization_config": None}, {"attn_logit_softcapping": None},
    {"pretraining_tp": 2}, {"torch_dtype": "bfloat16", "use_cache": True}, {"own_key": False, "more": []},
    {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}])
def test_neutral_values_are_taken_in_silence(neutral):
    assert ModelConfig.from_dict(FACTS | neutral).notes == ""


def test_keys_that_nobody_knows_are_named_in_one_line():
    config = ModelConfig.from_dict(FACTS | {"own_key": 2, "line\nbreak": True, "use_cache": True})
    assert config.notes.count("\n") == 1 and "own_key, \"line\\nbreak\"" in config.notes
    assert config == ModelConfig.from_dict(FACTS)


def test_a_key_has_one_meaning():
    assert not KEYS.keys() & NEUTRAL.keys() and not HARMLESS & {*KEYS, *NEUTRAL}


@pytest.mark.parametrize("key,value", [
    ("hidden_size", 64.0), ("hidden_size", "64"), ("hidden_size", -64), ("vocab_size", 0),
    ("vocab_size", 10**30), ("num_hidden_layers", None), ("num_hidden_layers", True),
    ("num_attention_heads", 0), ("num_key_value_heads", 0), ("head_dim", 0), ("rope_theta", float("nan")),
    ("rope_theta", 0), ("rope_theta", "1e4"), ("rms_norm_eps", -1e-5), ("max_position_embeddings", [1]),
    ("tie_word_embeddings", 1), ("attention_bias", "no"), ("rope_scaling", [1]), ("rope_scaling", 8),
    ("rope_scaling", {"type": 3}), ("rope_scaling", {"type": "linear", "factor": "2"}),
    ("architectures", "LlamaForCausalLM")])
def test_wrong_values_are_named_with_file_and_key(tmp_path, key, value):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FACTS | {key: value}))
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_json(path)
    message = str(caught.value)
    named = {"rope_scaling": "rope_scaling|rope_type|factor"}.get(key, key)
    assert message.startswith(f"{path}: ") and re.search(named, message) and "\n" not in message


@pytest.mark.parametrize("contents", [
    b"", b"[]", b"7", b"{", b"\xff{}", b"[" * 5000, b'{"a": ' * 5000, b'{"a": 1' + b"0" * 5000 + b"}"])
def test_what_is_no_object_is_said_with_the_file(tmp_path, contents):
    path = tmp_path / "config.json"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match="JSON") as caught:
        ModelConfig.from_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_or_a_pointer_in_its_place_is_called_so(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        ModelConfig.from_json(path)
    path.write_text(json.dumps(FACTS))
    assert ModelConfig.from_json(path) == ModelConfig.from_dict(FACTS)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter_config.json.*merge"):
        ModelConfig.from_json(path)


@pytest.mark.parametrize("contents,message", [
    (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"", "torch"), (b"PK", "torch")])
def test_weights_that_are_none_are_refused(tmp_path, contents, message):
    (tmp_path / "model.pth").write_bytes(contents)
    with pytest.raises(ValueError, match=f"model.pth.*{message}"):
        CheckpointSource(tmp_path / "model.pth", None)


@pytest.mark.parametrize("state", [[torch.ones(1)], {1: torch.ones(1)}, {"a": 1}, {"a": FACTS.keys}])
def test_a_file_of_other_things_is_no_checkpoint(tmp_path, state):
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(ValueError, match="model.pth.*more than named"):
        CheckpointSource(tmp_path / "model.pth", None)


def test_missing_config_says_where_it_was_sought(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        ModelConfig.from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json"):
        ModelConfig.from_json(tmp_path / "config.json")


@pytest.mark.parametrize("change,message", [
    ({"num_hidden_layers": 1}, "layers.1.* no place"), ({"num_hidden_layers": 3}, "lacks layers.2"),
    ({"vocab_size": 299}, "lm_head.weight is .300, 96.")])
def test_a_checkpoint_of_another_config_is_refused(tiny_checkpoint, change, message):
    facts = json.loads(tiny_checkpoint.with_name("config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tiny_checkpoint, ModelConfig.from_dict(facts))


@pytest.mark.parametrize("quantization", [None, "int8wo"])
def test_only_a_tied_model_does_without_lm_head(tiny_checkpoint, tmp_path, quantization):
    state = torch.load(tiny_checkpoint)
    del state["lm_head.weight"]
    torch.save(state, tmp_path / "model.pth")
    load_checkpoint(tmp_path / "model.pth", tiny_config(tie_word_embeddings=True), quantization=quantization)
    with pytest.raises(ValueError, match="lacks lm_head.weight"):
        load_checkpoint(tmp_path / "model.pth", tiny_config(), quantization=quantization)

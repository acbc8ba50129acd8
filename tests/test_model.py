"""config.json in, config.json out; rotary angles against transformers' own."""
import json

import pytest
import torch
from conftest import tiny_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model import ModelConfig, RopeScaling, rope_frequencies

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
    ({"num_key_value_heads": 3}, "multiple"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"), ({"hidden_size": 66}, "head_dim"),
    ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor")])
def test_unsupported_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(FACTS | change)


def test_missing_config_says_where_it_was_sought(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        ModelConfig.from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json"):
        ModelConfig.from_json(tmp_path / "config.json")

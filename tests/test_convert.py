"""Converted checkpoints compute what transformers computes; broken ones are refused and leave nothing."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import convert_gguf_checkpoint
import convert_hf_checkpoint
from checkpoint_writer import CheckpointWriter, checkpoint_parts, fused_dtypes
from gguf_tokenizer import build_tokenizer, stop_ids, tokenizer_settings
from kv_cache import CacheSpec, attach
from model import ModelConfig, RopeScaling, Transformer, rope_frequencies

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "heads 1:1": dict(num_attention_heads=4, num_key_value_heads=4),
    "heads 3:1, tied": dict(num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "heads 4:1, llama3": dict(num_attention_heads=4, num_key_value_heads=1, rope_parameters=LLAMA3),
    "head_dim given": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "biases": dict(num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True)}


def hf_model(**changes) -> "transformers.LlamaForCausalLM":
    """A random tiny Llama in float32; norms and biases random, too, so that a swap of two shows."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, **changes})
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model


def load(folder: Path) -> Transformer:
    """The converted model of a folder, its state dict complete but for a tied lm_head."""
    model = Transformer(ModelConfig.from_json(folder / "config.json")).eval()
    state = torch.load(folder / "model.pth", weights_only=True, mmap=True)
    expected = set(model.state_dict())
    if model.config.tie_word_embeddings:
        expected.remove("lm_head.weight")
    assert set(state) == expected
    model.load_state_dict(state, strict=False)
    return model


def save_bin(model: "transformers.PreTrainedModel", folder: Path, shards: int = 1) -> None:
    """Save as pytorch_model.bin, which transformers no longer writes; with a stale buffer, without index."""
    model.config.save_pretrained(folder)
    state = dict(model.state_dict())  # a tied lm_head is in it
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    for i in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        torch.save(dict(list(state.items())[i::shards]), folder / name)


@torch.no_grad()
def assert_same_logits(ours: Transformer, theirs: "transformers.PreTrainedModel") -> None:
    """Whole and token by token, within 1e-4."""
    tokens = torch.randint(0, theirs.config.vocab_size, (2, 150), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits  # [B, T, V]
    spec = CacheSpec(dtype=torch.float32)
    attach(ours, spec, 2, 160)
    whole = ours(tokens, torch.zeros(2, dtype=torch.long), all_logits=True)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    attach(ours, spec, 2, 160)
    steps = [ours(tokens[:, t:t + 1], torch.full((2,), t)) for t in range(24)]
    torch.testing.assert_close(torch.stack(steps, 1), expected[:, :24], atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_safetensors_give_the_logits_of_transformers(tmp_path, changes):
    theirs = hf_model(**changes)
    theirs.save_pretrained(tmp_path)
    convert_hf_checkpoint.convert(tmp_path)
    assert_same_logits(load(tmp_path), theirs)


@pytest.mark.parametrize("index", [True, False])
def test_safetensors_shards_with_and_without_index(tmp_path, index):
    theirs = hf_model(**MODELS["heads 3:1, tied"])
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    if not index:
        (tmp_path / "model.safetensors.index.json").unlink()
    convert_hf_checkpoint.convert(tmp_path)
    assert_same_logits(load(tmp_path), theirs)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["heads 3:1, tied", "heads 4:1, llama3"])
def test_bin_files_give_the_logits_of_transformers(tmp_path, name, shards):
    theirs = hf_model(**MODELS[name])
    save_bin(theirs, tmp_path, shards)
    convert_hf_checkpoint.convert(tmp_path)
    assert_same_logits(load(tmp_path), theirs)


def test_bin_from_before_zip_files(tmp_path):
    theirs = hf_model(**MODELS["heads 1:1"])
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    convert_hf_checkpoint.convert(tmp_path)
    assert_same_logits(load(tmp_path), theirs)


def test_dtype_is_kept_or_as_asked(tmp_path):
    theirs = hf_model(**MODELS["heads 1:1"])
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    for asked, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        state = torch.load(convert_hf_checkpoint.convert(tmp_path, asked), weights_only=True)
        assert {tensor.dtype for tensor in state.values()} == {expected}
        assert torch.equal(state["embed.weight"].bfloat16(), theirs.model.embed_tokens.weight)


def test_result_is_an_ordinary_file_of_torch_save(tmp_path):
    hf_model(**MODELS["heads 1:1"]).save_pretrained(tmp_path)
    path = convert_hf_checkpoint.convert(tmp_path)
    mapped, read = (torch.load(path, weights_only=True, mmap=mmap) for mmap in (True, False))
    assert all(tensor.is_contiguous() and tensor.storage_offset() == 0 for tensor in mapped.values())
    assert list(mapped) == list(read) and all(torch.equal(mapped[name], read[name]) for name in read)


def edit_weights(folder: Path, edit) -> None:
    state = safetensors_torch.load_file(folder / "model.safetensors")
    edit(state)
    safetensors_torch.save_file(state, folder / "model.safetensors", {"format": "pt"})


BROKEN = {
    "missing": (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"),
                r"lacks model\.layers\.1\.mlp\.up_proj"),
    "unexpected": (lambda s: s.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}),
                   r"unexpected tensors: model\.layers\.0\.self_attn\.q_norm\.weight"),
    "shape": (lambda s: s.update({"model.norm.weight": torch.ones(47)}),
              r"model\.norm\.weight .*\[47\].*\[48\]"),
    "untied without lm_head": (lambda s: s.pop("lm_head.weight"), r"lacks lm_head\.weight"),
    "quantized": (lambda s: s.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
                  r"model\.norm\.weight is torch\.int8")}


@pytest.mark.parametrize("edit, message", BROKEN.values(), ids=BROKEN.keys())
def test_wrong_tensors_are_named(tmp_path, edit, message):
    hf_model(**MODELS["heads 1:1"]).save_pretrained(tmp_path)
    edit_weights(tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        convert_hf_checkpoint.convert(tmp_path)
    assert not list(tmp_path.glob("model.pth*"))


def test_tied_file_may_carry_its_lm_head_but_no_other(tmp_path):
    theirs = hf_model(**MODELS["heads 3:1, tied"])
    theirs.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}))
    convert_hf_checkpoint.convert(tmp_path)
    assert_same_logits(load(tmp_path), theirs)
    edit_weights(tmp_path, lambda s: s["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        convert_hf_checkpoint.convert(tmp_path)


def test_missing_shard_is_named(tmp_path):
    hf_model(**MODELS["heads 1:1"]).save_pretrained(tmp_path, max_shard_size="40KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    for _ in range(2):  # the second time without the index
        with pytest.raises(ValueError, match=lost.name):
            convert_hf_checkpoint.convert(tmp_path)
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)


def test_other_families_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        convert_hf_checkpoint.convert(tmp_path)
    hf_model(**MODELS["heads 1:1"]).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no weights"):
        convert_hf_checkpoint.convert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"model_type": "qwen2"}, {"architectures": ["LlamaForSequenceClassification"]}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match="supported"):
            convert_hf_checkpoint.convert(tmp_path)


def test_what_changes_the_result_is_refused_and_unknown_keys_are_named(tmp_path, capsys):
    hf_model(**MODELS["heads 1:1"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "own_key": 2}))
    convert_hf_checkpoint.convert(tmp_path)
    assert [line for line in capsys.readouterr().err.splitlines() if "own_key" in line]
    gptq = {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **gptq}))
    with pytest.raises(ValueError, match="config.json: quantization_config.*gptq"):
        convert_hf_checkpoint.convert(tmp_path)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_stopped_conversion_leaves_no_file(tmp_path, monkeypatch, error):
    hf_model(**MODELS["heads 1:1"]).save_pretrained(tmp_path)
    path = convert_hf_checkpoint.convert(tmp_path)
    before = path.read_bytes()
    write, calls = CheckpointWriter.write, []

    def stop_at_the_fifth(self, *args):
        calls.append(args)
        if len(calls) == 5:
            raise error
        return write(self, *args)

    monkeypatch.setattr(CheckpointWriter, "write", stop_at_the_fifth)
    with pytest.raises(type(error)):
        convert_hf_checkpoint.convert(tmp_path)
    assert path.read_bytes() == before  # the finished one of before stays
    path.unlink()
    calls.clear()
    with pytest.raises(type(error)):
        convert_hf_checkpoint.convert(tmp_path)
    assert not list(tmp_path.glob("model.pth*"))


def test_float16_refuses_what_it_cannot_hold(tmp_path):
    hf_model(**MODELS["heads 1:1"]).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda s: s["model.norm.weight"].fill_(1e6))
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*float16"):
        convert_hf_checkpoint.convert(tmp_path, torch.float16)


def test_writer_takes_a_tensor_in_pieces(tmp_path):
    config = ModelConfig(vocab_size=10, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4,
                         intermediate_size=12)
    parts = checkpoint_parts(config)
    tensors = {name: torch.randn(part.shape) for name, part in parts.items()}
    dtypes = fused_dtypes(parts, dict.fromkeys(parts, torch.float32))
    with CheckpointWriter(tmp_path / "model.pth", parts, dtypes) as writer:
        written = sum(writer.write(name, tensor[row:row + 4].t().contiguous().t(), row)  # not contiguous
                      for name, tensor in tensors.items() for row in range(0, len(tensor), 4))
    state = torch.load(tmp_path / "model.pth", weights_only=True)
    assert written == writer.nbytes == sum(tensor.nbytes for tensor in state.values())
    qkv = [tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(state["layers.0.attention.wqkv.weight"], torch.cat(qkv))
    assert torch.equal(state["lm_head.weight"], tensors["lm_head.weight"])


def test_scripts_say_what_is_wrong_in_one_line_and_exit_2(tmp_path):
    for argv in (["convert_hf_checkpoint.py", "--checkpoint_dir", str(tmp_path)],
                 ["convert_gguf_checkpoint.py", str(tmp_path / "none.gguf")]):
        run = subprocess.run([sys.executable, *argv], capture_output=True, text=True,
                             cwd=Path(convert_hf_checkpoint.__file__).parent)
        assert run.returncode == 2 and str(tmp_path) in run.stderr and "Traceback" not in run.stderr


# ---- GGUF

TEXTS = ["", "hello world", "Hello 2024 don't\n\n  x", "日本語 🎉\r\n\té",
         "<|im_start|>user\nhi<|im_end|>", "  two "]


def byte_level_vocabulary() -> dict:
    """GGUF metadata of a small byte-level BPE, trained here, with two control tokens in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        ["2024 hello world, don't hold the world"] * 3,
        trainers.BpeTrainer(vocab_size=300, show_progress=False,
                            special_tokens=["<|im_start|>", "<|im_end|>"],
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
            "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
            "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages }}"}


def interleave(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Row order of q and k in GGUF: the two halves of each head alternate."""
    halves = weight.reshape(n_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: "transformers.PreTrainedModel", metadata: dict,
               extra: dict[str, torch.Tensor] | None = None, arch: str = "llama",
               down_type: str = "F32") -> None:
    """What llama.cpp's converter makes of the model in float32, its down projections in another type.

    metadata: the vocabulary and whatever else; extra: more tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    for key, value in metadata.items():
        writer.kv_data[0].pop(key, None)
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32,
               float: writer.add_float32, list: writer.add_array}[type(value)]
        add(key, value)
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = interleave(weight, heads)
        kind = gguf.GGMLQuantizationType[down_type if "down_proj" in name else "F32"]
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(convert_gguf_checkpoint.gguf_name(name), gguf.quantize(weight.numpy(), kind),
                              raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["heads 1:1", "heads 3:1, tied", "head_dim given", "biases"])
def test_gguf_equals_the_conversion_of_the_same_hf_model(tmp_path, name):
    vocabulary = byte_level_vocabulary()
    theirs = hf_model(**{**MODELS[name], "vocab_size": len(vocabulary["tokenizer.ggml.tokens"])})
    theirs.save_pretrained(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", theirs, vocabulary)
    expected = torch.load(convert_hf_checkpoint.convert(tmp_path / "hf"), weights_only=True)
    path = convert_gguf_checkpoint.convert(tmp_path / "m.gguf", dtype="float32")
    assert path == tmp_path / "m" / "model.pth"
    state = torch.load(path, weights_only=True)
    assert list(state) == list(expected) and all(torch.equal(state[key], expected[key]) for key in expected)
    configs = [ModelConfig.from_json(tmp_path / folder / "config.json") for folder in ("hf", "m")]
    assert configs[0] == configs[1]


def test_gguf_in_small_chunks_and_quantized(tmp_path, monkeypatch):
    vocabulary = byte_level_vocabulary()
    theirs = hf_model(num_attention_heads=6, num_key_value_heads=2, intermediate_size=64, head_dim=8,
                      vocab_size=len(vocabulary["tokenizer.ggml.tokens"]))
    write_gguf(tmp_path / "m.gguf", theirs, vocabulary, down_type="Q8_0")
    whole = torch.load(convert_gguf_checkpoint.convert(tmp_path / "m.gguf"), weights_only=True)
    monkeypatch.setattr(convert_gguf_checkpoint, "CHUNK_ELEMENTS", 100)
    pieces = torch.load(convert_gguf_checkpoint.convert(tmp_path / "m.gguf", tmp_path), weights_only=True)
    assert whole["embed.weight"].dtype == torch.bfloat16
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    down = theirs.model.layers[1].mlp.down_proj.weight  # 8 bits: off by half of max / 127, then bfloat16
    error = (whole["layers.1.mlp.w_down.weight"].float() - down).abs().max()
    assert 0.2 < error / (down.abs().max() / 127) < 2


@pytest.mark.parametrize("original, high", [(64, 4.0), (8192, 4.0), (100, 6.0)])
def test_gguf_rope_divisors_become_llama3_scaling(original, high):
    plain = ModelConfig(vocab_size=8, dim=64, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=64,
                        intermediate_size=8, rope_theta=500000.0)
    scaling = RopeScaling("llama3", 32.0, 1.0, high, original)
    scaled = ModelConfig(**{**vars(plain), "rope_scaling": scaling})
    divisors = (rope_frequencies(plain) / rope_frequencies(scaled)).double().numpy()
    assert convert_gguf_checkpoint.llama3_scaling(divisors, plain) == scaling
    with pytest.raises(ValueError, match="rope_freqs"):
        convert_gguf_checkpoint.llama3_scaling(divisors + np.linspace(0, 3, 32), plain)


def test_gguf_with_rope_freqs_gives_the_logits_of_transformers(tmp_path):
    vocabulary = byte_level_vocabulary()
    theirs = hf_model(num_attention_heads=2, num_key_value_heads=1, head_dim=48, rope_parameters=LLAMA3,
                      vocab_size=len(vocabulary["tokenizer.ggml.tokens"]))
    plain = 1 / 10000 ** (torch.arange(0, 48, 2) / 48)
    write_gguf(tmp_path / "m.gguf", theirs, vocabulary,
               {"rope_freqs.weight": plain / theirs.model.rotary_emb.inv_freq})
    convert_gguf_checkpoint.convert(tmp_path / "m.gguf", tmp_path, "float32")
    assert_same_logits(load(tmp_path), theirs)


@pytest.mark.parametrize("metadata, message", [
    ({"arch": "qwen2"}, "qwen2"), ({"llama.expert_count": 8}, "mixture"),
    ({"llama.attention.head_count": [4, 2]}, "layer to layer"),
    ({"llama.rope.scaling.type": "yarn"}, "yarn"), ({"llama.rope.dimension_count": 6}, "rotary"),
    ({"llama.rope.scaling.factor": -2.0}, "factor is -2.0"), ({"general.type": "adapter"}, "adapter"),
    ({"llama.attention.sliding_window": 64}, "sliding_window 64"), ({"llama.logit_scale": 8.0}, "logits_sc"),
    ({"llama.block_count": 0}, "num_hidden_layers is 0"), ({"llama.rope.freq_base": 0.0}, "rope_theta is 0"),
    ({"tokenizer.ggml.merges": ["no-space"]}, "tokenizer.ggml.* damaged"),
    ({"tokenizer.ggml.merges": ["not there"]}, "tokenizer.ggml.* damaged"),
    ({"tokenizer.ggml.pre": "tekken"}, "tekken.*smollm"), ({"tokenizer.ggml.model": "bert"}, "bert.*gpt2"),
    ({"extra": {"blk.0.attn_q_norm.weight": torch.ones(12)}}, r"unexpected tensors: blk\.0\.attn_q_norm")])
def test_gguf_that_is_not_supported_is_refused_with_the_reason(tmp_path, metadata, message):
    vocabulary = byte_level_vocabulary()
    theirs = hf_model(**MODELS["heads 1:1"], vocab_size=len(vocabulary["tokenizer.ggml.tokens"]))
    keys = {key: value for key, value in metadata.items() if "." in key}
    others = {key: value for key, value in metadata.items() if "." not in key}
    write_gguf(tmp_path / "m.gguf", theirs, {**vocabulary, **keys}, **others)
    with pytest.raises(ValueError, match=message):
        convert_gguf_checkpoint.convert(tmp_path / "m.gguf")
    assert not list(tmp_path.glob("m/model.pth*"))


@pytest.mark.parametrize("kind, factor, expected", [
    ("linear", 4.0, RopeScaling("linear", 4.0)), (None, 4.0, RopeScaling("linear", 4.0)), ("none", 4.0, None),
    ("linear", 1.0, None)])
def test_gguf_rope_scaling_of_type_none_scales_nothing(kind, factor, expected):
    metadata = {"llama.rope.scaling.factor": factor} | ({"llama.rope.scaling.type": kind} if kind else {})
    assert convert_gguf_checkpoint.rope_scaling(metadata, {}, None) == expected


def test_gguf_names_unknown_keys_and_reads_minus_one_as_no_token(tmp_path, capsys):
    vocabulary = {**byte_level_vocabulary(), "tokenizer.ggml.add_bos_token": True, "llama.own_key": 3,
                  "tokenizer.ggml.bos_token_id": 2**32 - 1}
    theirs = hf_model(**MODELS["heads 1:1"], vocab_size=len(vocabulary["tokenizer.ggml.tokens"]))
    write_gguf(tmp_path / "m.gguf", theirs, vocabulary)
    convert_gguf_checkpoint.convert(tmp_path / "m.gguf", tmp_path)
    assert [line for line in capsys.readouterr().err.splitlines() if "llama.own_key" in line]
    assert "bos_token_id" not in json.loads((tmp_path / "config.json").read_text())


def test_byte_level_tokenizer_round_trips_and_splits_digits():
    metadata = byte_level_vocabulary()
    tokenizer = build_tokenizer(metadata)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>").ids == [0]
    digits = tokenizer.encode("2024").tokens
    assert digits == list("2024") and "2024" in metadata["tokenizer.ggml.tokens"]
    assert build_tokenizer({**metadata, "tokenizer.ggml.pre": "gpt-2"}).encode("2024").tokens == ["2024"]
    assert stop_ids(metadata) == [1]
    settings = tokenizer_settings(metadata)
    assert settings["chat_template"] == "{{ messages }}" and settings["eos_token"] == "<|im_end|>"
    assert settings["add_bos_token"] is False


def test_llama3_tokenizer_splits_by_three_digits_and_starts_with_bos():
    metadata = {**byte_level_vocabulary(), "tokenizer.ggml.pre": "llama-bpe"}
    del metadata["tokenizer.ggml.add_bos_token"]  # the family has one
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("hello 20242").ids
    assert ids[0] == 0 and 0 not in ids[1:] and tokenizer.decode(ids) == "hello 20242"
    assert "".join(tokenizer.encode("hello 20242", add_special_tokens=False).tokens[-3:]).endswith("20242")
    assert "2024" not in tokenizer.encode("20242").tokens  # 202|42
    assert tokenizer_settings(metadata)["add_bos_token"] is True


def test_sentencepiece_tokenizer_gives_the_ids_of_sentencepiece(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "text"
    corpus.write_text("hello world, don't hold the old world\nthe other  hello 2024 théâtre\n" * 20)
    spm.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "m"), vocab_size=330, model_type="bpe",
        byte_fallback=True, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2)
    theirs = spm.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ids = range(theirs.vocab_size())
    types = [1 + theirs.is_unknown(i) + 2 * theirs.is_control(i) + 5 * theirs.is_byte(i) for i in ids]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in ids], "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": theirs.bos_id(), "tokenizer.ggml.eos_token_id": theirs.eos_id()}
    tokenizer = build_tokenizer(metadata)
    for text in [text for text in TEXTS if "<" not in text]:
        assert tokenizer.encode(text).ids == [theirs.bos_id(), *theirs.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

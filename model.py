"""A Llama-family transformer that keeps no memory of a call except its KV cache.

Letters: B batch, T new tokens of this call, S slots of the cache, H key/value heads, G query heads per
key/value head, D head_dim, E model dim, V vocabulary.  ModelConfig comes from a Hugging Face config.json and
nothing else.  Needs torch only.  Every attention layer wants a cache before the first call: kv_cache.attach,
or any object with write(start, k, v) and attend(q, start); one with write_and_attend(start, q, k, v) as well
is asked for both at once.
"""
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are stretched: `linear` (all by `factor`) or `llama3` (low frequencies only)."""
    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"rope scaling: high_freq_factor {self.high_freq_factor} must be more than "
                             f"low_freq_factor {self.low_freq_factor}; correct them or fetch the file again")

    @classmethod
    def from_dict(cls, d: dict | None) -> "RopeScaling | None":
        """From config.json's `rope_scaling` or `rope_parameters`; None when nothing is scaled."""
        d = d or {}
        kind = next((d[key] for key in ("rope_type", "type") if d.get(key) is not None), "default")
        if not isinstance(kind, str) or kind not in ROPE_KINDS:
            raise ValueError(f"rope_type {shown(kind)} is not supported; supported: {', '.join(ROPE_KINDS)}")
        needed = ROPE_KINDS[kind]
        other = [key for key in d if d[key] and key not in ROPE_BESIDE and key not in needed]
        if other:
            raise ValueError(f"rope_type {shown(kind)} does not take {shown(other[0])}; "
                             f"it takes: {', '.join(needed) or 'nothing'}")
        fields = read_keys(d, {key: ROPE_KEYS[key] for key in needed}, needed)
        return cls(kind, **fields) if needed else None


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, as config.json states it."""
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)  # of the file; they were not read

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"num_attention_heads {self.n_heads} is no multiple of "
                             f"num_key_value_heads {self.n_kv_heads}; correct them or fetch the file again")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelConfig":
        """Read a Hugging Face config.json.  ValueError when it is missing, no JSON, or of another family."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"no config at {path}; a checkpoint needs its config.json beside it")
        adapter = path.with_name("adapter_config.json")
        if adapter.is_file():
            raise ValueError(f"{adapter}: adapters are not supported; merge it into the weights (peft's "
                             "merge_and_unload), or move it away to run the model without it")
        contents = read_json(path)
        try:
            return cls.from_dict(contents)
        except (ValueError, RecursionError) as e:  # the latter in deeply nested values
            raise ValueError(f"{path}: {e}") from e

    @classmethod
    def from_dict(cls, d: dict) -> "ModelConfig":
        """From the contents of a config.json (`model_type` llama).  ValueError names what is unsupported."""
        refuse_other_families(d)
        rope = rope_of(d)
        flat = d | {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")
                    if rope.get(key) is not None}  # those inside go first
        fields = read_keys(flat, KEYS, REQUIRED)
        refuse_unsupported(flat, fields["max_position_embeddings"])
        dim, n_heads = fields["dim"], fields["n_heads"]
        if fields["head_dim"] is None and dim % n_heads:
            raise ValueError(f"hidden_size {dim} is no multiple of num_attention_heads {n_heads}; "
                             "give head_dim or correct them")
        fields["head_dim"] = fields["head_dim"] or dim // n_heads
        fields["n_kv_heads"] = fields["n_kv_heads"] or n_heads
        unknown = tuple(key for key in d if d[key] and key not in {*KEYS, *NEUTRAL, *HARMLESS})
        return cls(**fields, rope_scaling=RopeScaling.from_dict(rope), unknown_keys=unknown)

    @property
    def notes(self) -> str:
        """A line on the keys of the file that were not read; empty when there are none."""
        names = ", ".join(key if key.isidentifier() else shown(key) for key in self.unknown_keys)
        return f"note: the config's {names} is not known here and not used\n" if names else ""

    def to_dict(self) -> dict:
        """The same facts as the contents of a Hugging Face config.json."""
        scaling = None
        if self.rope_scaling is not None:
            scaling = {k: v for k, v in vars(self.rope_scaling).items()
                       if self.rope_scaling.rope_type == "llama3" or k in ("rope_type", "factor")}
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": self.vocab_size, "hidden_size": self.dim, "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads, "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim, "intermediate_size": self.intermediate_size,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta, "rope_scaling": scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}


def rope_frequencies(config: ModelConfig, device: torch.device | str | None = None) -> Tensor:
    """Radians per position of each rotary pair, float32 [D/2] (Su et al., arXiv 2104.09864, section 3.2.2).

    `llama3` scaling divides the frequencies whose wavelength is longer than the original context by `factor`,
    keeps the short ones, and blends between (Llama 3.1's reference implementation).
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    freqs = 1.0 / config.rope_theta ** exponent
    s = config.rope_scaling
    if s is None:
        return freqs
    if s.rope_type == "linear":
        return freqs / s.factor
    turns = s.original_max_position_embeddings * freqs / (2 * math.pi)  # in the original context
    blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = blend.clamp(0, 1)
    return freqs * (blend + (1 - blend) / s.factor)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, heads, D], half-split pairs, by its angles' cos and sin (float32 [B, T, 1, D/2])."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention over a cache that it writes first and then reads; `cache` is attached later."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        rows = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.wqkv = nn.Linear(config.dim, rows, bias=config.attention_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=config.attention_bias)
        self.cache = None

    def forward(self, x: Tensor, start: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.cache is None:
            raise ValueError("no KV cache: call kv_cache.attach(model, CacheSpec(), batch, length) first")
        B, T, _ = x.shape
        qkv = self.wqkv(x).view(B, T, -1, self.head_dim)  # [B, T, heads, D]
        qk, v = qkv.split([self.n_heads + self.n_kv_heads, self.n_kv_heads], dim=2)
        q, k = apply_rope(qk, cos, sin).split([self.n_heads, self.n_kv_heads], dim=2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
        if hasattr(self.cache, "write_and_attend"):
            y = self.cache.write_and_attend(start, q, k, v)
        else:
            self.cache.write(start, k, v)
            y = self.cache.attend(q, start)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """The gated SiLU feed-forward, its gate and up projections fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w_gate_up = nn.Linear(config.dim, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.w_down = nn.Linear(config.intermediate_size, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w_gate_up(x).chunk(2, dim=-1)
        return self.w_down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind an RMS norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, start: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), start, cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The decoder.  With tied embeddings `lm_head` shares the embedding's weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def begin(self, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the layers get: embeddings [B, T, E]; cos and sin [B, T, 1, D/2] of the positions' angles."""
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, T]
        angles = positions[:, :, None, None] * rope_frequencies(self.config, tokens.device)  # [B, T, 1, D/2]
        return self.embed(tokens), angles.cos(), angles.sin()

    def hidden(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Final normed states [B, T, E] of tokens [B, T] (int64) that stand at start[b] .. start[b]+T-1."""
        x, cos, sin = self.begin(tokens, start)
        for layer in self.layers:
            x = layer(x, start, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor, start: Tensor, all_logits: bool = False) -> Tensor:
        """Logits [B, V] after the last of tokens [B, T]; with `all_logits` [B, T, V].

        start: int64 [B], the position of each row's first token; those before it must be in the cache.
        """
        x = self.hidden(tokens, start)
        return self.lm_head(x if all_logits else x[:, -1])


# ---- What a config.json may hold

class Key(NamedTuple):
    """What a key may hold: true or false, or a number from `lowest` to `highest`; null means `default`."""
    field: str  # of the dataclass
    kind: type
    lowest: float = 1
    highest: float = 1 << 24  # a larger size is no model of today, but a damaged file
    default: object = None


KEYS = {
    "vocab_size": Key("vocab_size", int), "hidden_size": Key("dim", int),
    "num_hidden_layers": Key("n_layers", int, highest=4096), "num_attention_heads": Key("n_heads", int),
    "num_key_value_heads": Key("n_kv_heads", int), "head_dim": Key("head_dim", int),
    "intermediate_size": Key("intermediate_size", int), "rms_norm_eps": Key("norm_eps", float, 0, 1, 1e-6),
    "rope_theta": Key("rope_theta", float, 1, 1e30, 10000.0),
    "max_position_embeddings": Key("max_position_embeddings", int, default=2048),
    "tie_word_embeddings": Key("tie_word_embeddings", bool, default=False),
    "attention_bias": Key("attention_bias", bool, default=False),
    "mlp_bias": Key("mlp_bias", bool, default=False)}
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

# Of rope_scaling or rope_parameters: what each kind needs, and what may stand beside it.
ROPE_KEYS = {
    "factor": Key("factor", float, 1, 1e6), "low_freq_factor": Key("low_freq_factor", float, 0, 1e6),
    "high_freq_factor": Key("high_freq_factor", float, 0, 1e6),
    "original_max_position_embeddings": Key("original_max_position_embeddings", int)}
ROPE_KINDS = {"default": (), "linear": ("factor",), "llama3": tuple(ROPE_KEYS)}
ROPE_BESIDE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")

# Keys that change the result and are not computed here -> the values, besides null, that change nothing.
NEUTRAL = {
    "add_cross_attention": (False,), "attention_multiplier": (), "attn_logit_softcapping": (0,),
    "clip_qkv": (), "compression_config": ({},), "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,), "is_encoder_decoder": (False,), "logit_scale": (1,),
    "logits_scaling": (1,), "num_experts": (0,), "num_local_experts": (0,), "partial_rotary_factor": (1,),
    "qk_layernorm": (False,), "qk_norm": (False,), "quantization_config": ({},),
    "query_pre_attn_scalar": (), "residual_multiplier": (1,), "rope_interleave": (False,),
    "rope_interleaved": (False,), "use_qk_norm": (False,)}

# Keys that leave the logits as they are, or are looked at elsewhere in this file.  (pretraining_tp cuts sums
# into parts: rounding only.)
HARMLESS = frozenset("""
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id do_sample
    dtype early_stopping eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id hidden_act
    id2label initializer_range is_decoder is_llama_config label2id layer_types length_penalty max_length
    max_sequence_length max_window_layers min_length model_type num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type pruned_heads
    repetition_penalty return_dict rope_parameters rope_scaling sep_token_id sliding_window temperature
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unsloth_fixed unsloth_version use_cache use_sliding_window""".split())

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"


def read_keys(d: dict, keys: dict[str, Key], required: Iterable[str]) -> dict[str, object]:
    """The fields that `keys` describe, from d or their defaults.  ValueError names the first bad key."""
    fields = {}
    for name, key in keys.items():
        value = d.get(name)
        if value is None and name not in required:
            fields[key.field] = key.default
            continue
        numbers = (int, float) if key.kind is float else key.kind
        valid = isinstance(value, numbers) and isinstance(value, bool) == (key.kind is bool)
        if not valid or not (key.kind is bool or key.lowest <= value <= key.highest):  # NaN is in no range
            what = {int: "an integer", float: "a number"}.get(key.kind)
            expected = f"{what} from {key.lowest} to {key.highest}" if what else "true or false"
            found = shown(value) if name in d else "missing"
            raise ValueError(f"{name} is {found}; expected {expected}; correct it or fetch the file again")
        fields[key.field] = key.kind(value)
    return fields


def rope_of(d: dict) -> dict:
    """The older `rope_scaling` and the newer `rope_parameters` of a config.json together, {} without."""
    rope = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = d.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{key} is {shown(value)}; expected an object or null; fetch the file again")
        if value and rope and RopeScaling.from_dict(value) != RopeScaling.from_dict(rope):
            raise ValueError("rope_scaling and rope_parameters differ; keep the one that is right")
        rope |= value or {}
    return rope


def refuse_other_families(d: dict) -> None:
    """ValueError unless a config.json is that of a LlamaForCausalLM, as far as it says."""
    for key, only in (("model_type", "llama"), ("hidden_act", "silu")):
        if d.get(key, only) != only:
            raise ValueError(f"{key} {shown(d[key])} is not supported; supported: {only}")
    classes, only = d.get("architectures") or ["LlamaForCausalLM"], "LlamaForCausalLM"
    if not isinstance(classes, list) or only not in classes:
        found = shown(classes[0] if isinstance(classes, list) else classes)
        raise ValueError(f"architectures: {found} is not supported; expected a list with {only}")


def refuse_unsupported(d: dict, longest: int) -> None:
    """ValueError names a key whose value changes the result and is not computed here; longest: context."""
    refused = [key for key, neutral in NEUTRAL.items() if d.get(key) is not None and d[key] not in neutral]
    window, layers = d.get("sliding_window"), d.get("layer_types") or []
    if window is not None and d.get("use_sliding_window") is not False:
        refused += ["sliding_window"] * (not isinstance(window, int) or window < longest)
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        refused.append("layer_types")
    if refused:
        key, value, remedy = refused[0], d[refused[0]], "take a checkpoint without it"
        if key in ("quantization_config", "compression_config"):
            method = value.get("quant_method") if isinstance(value, dict) else value
            value, remedy = {"quant_method": method}, "take the original weights of 16 or 32 bits"
        raise ValueError(f"{key} {shown(value)} is not supported and would change the result; {remedy}")


def shown(value: object) -> str:
    """A value of a JSON file for a message: short, in one line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse_pointer(path: Path) -> None:
    """ValueError when a file cannot be read, or is only what Git LFS leaves in its place."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e
    if start == LFS_POINTER:
        raise ValueError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in its repository")


def read_json(path: Path) -> dict:
    """The object that a JSON file holds.  ValueError, with the path, when it holds anything else."""
    refuse_pointer(path)
    try:
        contents = json.loads(path.read_bytes())
        if not isinstance(contents, dict):
            raise ValueError(f"{shown(contents)}; expected an object")
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON that can be read ({e}); fetch it again") from e
    return contents

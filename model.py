"""A Llama-family transformer that keeps no memory of a call except its KV cache.

Letters: B batch, T new tokens of this call, S slots of the cache, H key/value heads, G query heads per
key/value head, D head_dim, E model dim, V vocabulary.  ModelConfig comes from a Hugging Face config.json and
nothing else.  Needs torch only.  Every attention layer wants a cache before the first call: kv_cache.attach,
or any object with write(start, k, v) and attend(q, start); one with write_and_attend(start, q, k, v) as well
is asked for both at once.
"""
import json
import math
from dataclasses import dataclass
from pathlib import Path

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

    @classmethod
    def from_dict(cls, d: dict | None) -> "RopeScaling | None":
        """From config.json's `rope_scaling` or `rope_parameters`; None when nothing is scaled."""
        kind = (d or {}).get("rope_type", (d or {}).get("type", "default"))
        if kind in ("default", None):
            return None
        needed = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor",
                                                   "original_max_position_embeddings"]}
        if kind not in needed:
            raise ValueError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
        missing = [name for name in needed[kind] if name not in d]
        if missing:
            raise ValueError(f"rope scaling {kind!r} in config.json lacks {', '.join(missing)}")
        return cls(kind, **{name: d[name] for name in needed[kind]})


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

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads are no multiple of {self.n_kv_heads} kv heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelConfig":
        """Read a Hugging Face config.json.  ValueError when it is missing, no JSON, or of another family."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"no config at {path}; a checkpoint needs its config.json beside it")
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, ValueError) as e:
            raise ValueError(f"{path}: {e}") from e

    @classmethod
    def from_dict(cls, d: dict) -> "ModelConfig":
        """From the contents of a config.json (`model_type` llama).  ValueError names what is unsupported."""
        if d.get("model_type", "llama") != "llama":
            raise ValueError(f"model_type {d['model_type']!r} is not supported; supported: llama")
        if d.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {d['hidden_act']!r} is not supported; supported: silu")
        required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                    "intermediate_size")
        missing = [name for name in required if name not in d]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}")
        dim, n_heads = d["hidden_size"], d["num_attention_heads"]
        head_dim = d.get("head_dim") or dim // n_heads
        if not d.get("head_dim") and dim % n_heads:
            raise ValueError(f"hidden_size {dim} is no multiple of {n_heads} heads and head_dim is not given")
        rope = d.get("rope_parameters") or d.get("rope_scaling") or {}
        return cls(
            vocab_size=d["vocab_size"], dim=dim, n_layers=d["num_hidden_layers"], n_heads=n_heads,
            n_kv_heads=d.get("num_key_value_heads") or n_heads, head_dim=head_dim,
            intermediate_size=d["intermediate_size"], norm_eps=d.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", d.get("rope_theta", 10000.0))),
            rope_scaling=RopeScaling.from_dict(rope),
            max_position_embeddings=d.get("max_position_embeddings", 2048),
            tie_word_embeddings=d.get("tie_word_embeddings", False),
            attention_bias=d.get("attention_bias", False), mlp_bias=d.get("mlp_bias", False))

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

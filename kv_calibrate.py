"""Bases for the 4-bit KV cache that suit a model: found once, at loading, from what its keys and queries do.

A 4-bit cache stores k @ A and meets the query as q @ B with A B^T = 1, so that scores stay what they were;
v likewise.  Which A makes the stored error cost least?  The error is about white in the stored basis, so its
cost in the scores is tr(A^T Ck A) tr(B^T Cq B), with Ck and Cq the second moments of keys and queries after
RoPE.  That is least for A = M^(1/2) U, M the geometric mean of Cq and the inverse of Ck (Bhatia 2007,
Positive Definite Matrices, ch. 4), with any rotation U.  U sorts the coordinates by energy: the first few,
which carry outliers and mean, keep 8 bits; the rest are mixed until they look Gaussian, as LEVELS expect.

The moments come from fixed pseudo-random tokens at positions up to the model's longest, so no text is needed
and every run finds the same bases.  A token's stored form depends on that token alone.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache import SIGMA, CacheSpec, KVCache, attach, detach, mixing

ROWS, LENGTH, SKIP = 32, 32, 4  # sequences, their tokens, and those at the front (sinks) that do not count
HEADROOM = 4.0  # a strong coordinate reaches 127 at its mean plus so many standard deviations
SHRINK = 0.3  # share of the identity in second moments: what a thousand tokens cannot tell


class _Moments:
    """A cache of one call that adds up the second moments of what passes through."""

    def __init__(self) -> None:
        self.q = self.k = self.v = self.k_mean = self.v_mean = 0.0

    def write(self, start: Tensor, k: Tensor, v: Tensor) -> None:
        self.now = k, v

    def attend(self, q: Tensor, start: Tensor) -> Tensor:
        k, v = self.now
        B, H = k.shape[:2]
        for name, x in (("q", q.reshape(B, H, -1, *q.shape[2:])), ("k", k[:, :, None]), ("v", v[:, :, None])):
            x = x[..., SKIP:, :].double()  # [B, H, G or 1, T, D]
            moment = torch.einsum("bhgtd,bhgte->hde", x, x) / (B * x.shape[3])
            setattr(self, name, getattr(self, name) + moment)
            if name != "q":
                setattr(self, f"{name}_mean", getattr(self, f"{name}_mean") + x.mean((0, 2, 3)))
        k, v = (x.repeat_interleave(q.shape[1] // H, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def calibrate(model: nn.Module) -> list[_Moments]:
    """The moments of every layer of `model`, from ROWS x LENGTH pseudo-random tokens; detaches its caches."""
    detach(model)
    moments = [_Moments() for _ in model.layers]
    for layer, cache in zip(model.layers, moments, strict=True):
        layer.attention.cache = cache
    ids = (torch.arange(ROWS * LENGTH) * 2654435761 % 2 ** 32 >> 16) % min(4096, model.config.vocab_size)
    ids = ids.view(ROWS, LENGTH)
    device = model.norm.weight.device
    span = max(model.config.max_position_embeddings - LENGTH, 0)
    start = (torch.linspace(0, 1, ROWS) ** 3 * span).long()  # dense near the front
    with torch.inference_mode():
        model.hidden(ids.to(device), start.to(device))
    detach(model)
    return moments


def attach_calibrated(model: nn.Module, spec: CacheSpec, *args: object, **options: object) -> None:
    """kv_cache.attach, with bases that suit the model where caches have 4 bits (a prefill of 1024 tokens)."""
    moments = calibrate(model) if 4 in (spec.k_bits, spec.v_bits) else None
    attach(model, spec, *args, **options)
    if moments is not None:
        for layer, found in zip(model.layers, moments, strict=True):
            set_bases(layer.attention.cache, found)


def set_bases(cache: KVCache, moments: _Moments) -> None:
    """Give a fresh 4-bit cache the bases that suit these moments, where it needs them."""
    spec = cache.spec
    if spec.k_bits == 4:
        strong = 2 * cache.k_values.shape[-1] - cache.head_dim
        into, back = basis(moments.k, moments.q, moments.k_mean, strong)
        cache.k_bases.copy_(torch.stack([into, back]))
    if spec.v_bits == 4:
        white = torch.eye(cache.head_dim, dtype=torch.float64, device=moments.v.device).expand_as(moments.v)
        strong = 2 * cache.v_values.shape[-1] - cache.head_dim
        into, back = basis(moments.v, white, moments.v_mean, strong)
        cache.v_bases.copy_(torch.stack([into, back.mT]))


def power(c: Tensor, p: float) -> Tensor:
    """c ** p of symmetric positive definite matrices [H, D, D]."""
    values, vectors = torch.linalg.eigh(c)
    return (vectors * values.clamp_min(1e-30)[:, None] ** p) @ vectors.mT


def _shrunk(c: Tensor) -> Tensor:
    scale = c.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-20)
    return (1 - SHRINK) * c / scale + SHRINK * torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)


def basis(ck: Tensor, cq: Tensor, mean: Tensor, strong: int) -> tuple[Tensor, Tensor]:
    """A and B, float32 [H, D, D], from second moments ck, cq [H, D, D] and the mean [H, D] (see the top)."""
    shrunk = _shrunk(ck)
    root, inverse = power(shrunk, 0.5), power(shrunk, -0.5)
    half = power(inverse @ power(root @ _shrunk(cq) @ root, 0.5) @ inverse, 0.5)
    energy, order = torch.linalg.eigh(half @ ck @ half)
    energy, order = energy.flip(-1).clamp_min(1e-30), order.flip(-1)
    into, back = half @ order, torch.linalg.inv(half) @ order
    if strong:
        rest = energy[:, strong:].mean(-1, keepdim=True).sqrt()
        centre = (mean[:, None] @ into[..., :strong]).squeeze(1).abs()
        reach = centre + HEADROOM * (energy[:, :strong] - centre.square()).clamp_min(0).sqrt()
        gain = (127 / SIGMA * rest / reach.clamp_min(1e-20))[:, None]
        into[..., :strong] *= gain
        back[..., :strong] /= gain
    mix = mixing(ck.shape[-1] - strong).to(ck.device)
    into[..., strong:] = into[..., strong:] @ mix
    back[..., strong:] = back[..., strong:] @ mix
    return into.float(), back.float()

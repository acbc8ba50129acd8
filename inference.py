"""Prefill in chunks, decode step by step, sample: a model with its caches attached, ready to generate.

    engine = Engine(model, CacheSpec.parse("int8"), cache_size=8192, compile=True)
    for token in engine.generate(prompt_ids, max_new_tokens=100, stop_ids=tokenizer.stop_ids):
        ...

Letters: B batch, T new tokens of a call, V vocabulary.
"""
import functools
import time
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kv_cache import CacheSpec, KVCache, at_position, attach
from kv_calibrate import attach_calibrated
from model import ModelConfig, Transformer

Sampler = Callable[[Tensor], Tensor]
COLDEST = 1e-6  # below it logits divided by the temperature might leave float32, so it counts as 0
GROUP_LAYERS = 5  # at most so many layers are compiled together on the CPU


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row: [B, V] -> int64 [B]."""
    return logits.float().argmax(-1)  # three times as fast on CPUs as in bfloat16


def make_sampler(temperature: float = 0.8, top_k: int | None = None, top_p: float | None = None) -> Sampler:
    """A function [B, V] logits -> [B] tokens, drawn among the `top_k` likeliest tokens and among the fewest
    that together have probability `top_p`.  Temperature 0 is greedy.  Draws by the exponential race
    argmax(p / e), e ~ Exp(1), which needs no synchronisation."""
    possible = (0 <= temperature < float("inf") and (top_k is None or top_k >= 1)
                and (top_p is None or 0 < top_p <= 1))
    if not possible:  # nan, too
        raise ValueError(f"sampling needs a finite temperature >= 0, top_k >= 1 and 0 < top_p <= 1, "
                         f"not {temperature}, {top_k}, {top_p}")
    if temperature < COLDEST:
        return greedy

    def sample(logits: Tensor) -> Tensor:
        logits, order = logits.float() / temperature, None
        if top_k is not None:  # from here on the candidates only, the likeliest first
            logits, order = logits.topk(min(top_k, logits.shape[-1]))
        elif top_p is not None:
            logits, order = logits.sort(descending=True)
        probs = logits.softmax(-1)
        if top_p is not None:
            beyond = probs.cumsum(-1) - probs >= top_p  # the first token always stays
            probs = probs.masked_fill(beyond, 0)
        choice = (probs / torch.empty_like(probs).exponential_(1)).argmax(-1, keepdim=True)
        return (choice if order is None else order.gather(-1, choice)).squeeze(-1)

    return sample


def _decode_step(model: Transformer, sampler: Sampler, token: Tensor, start: Tensor) -> Tensor:
    """The tokens [B] that follow token [B] at positions start [B]."""
    return sampler(model(token[:, None], start))


def _run_layers(layers: nn.ModuleList, x: Tensor, start: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, start, cos, sin)
    return x


def _compiled(function: Callable, backend: str | Callable = "inductor", **options: object) -> Callable:
    """`function` compiled for fixed shapes, without guards on modules: they cost a fifth of a step."""
    # A function of its own, since Dynamo keeps graphs by code object and these drop their guards.
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    options |= vector_options() if backend == "inductor" else {}
    return torch.compile(own, backend=backend, fullgraph=True, dynamic=False, options=options)


def vector_options() -> dict[str, int]:
    """Inductor's options for the vectors that PyTorch takes.  Where ATEN_CPU_CAPABILITY keeps it from wider
    ones, Inductor's cache would else hand out code made for those: its keys do not have that variable."""
    return {"cpp.simdlen": 256} if torch.backends.cpu.get_cpu_capability() == "AVX2" else {}


def _inductor_keeping(kept: list, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable:
    """A backend of torch.compile: Inductor; a call puts its graph and inputs into `kept`."""
    from torch._inductor.compile_fx import compile_fx  # takes a second to import
    unchecked = {"size_asserts": False, "cpp.vec_isa_ok": True}  # the latter: no trial compilations, 6 s
    compiled = compile_fx(graph, examples, config_patches=unchecked | vector_options())

    def call(*inputs: Tensor) -> tuple[Tensor]:
        kept[:] = compiled, list(inputs)
        return compiled(*inputs)

    return call


class _Groups:
    """Groups of layers, one after the other, by one compiled graph for fixed shapes.

    A group's first call goes through Dynamo, which finds the tensors of its modules.  Later calls hand the
    same tensors to the graph themselves: finding and checking them anew would be a sixth of a short step.
    """

    def __init__(self, layers: nn.ModuleList, size: int) -> None:
        self.groups = [layers[i:i + size] for i in range(0, len(layers), size)]
        self.attention, self.cache = layers[0].attention, layers[0].attention.cache
        self.calls: list[tuple[Callable, list, list[int]]] = []  # graph, inputs, which of them vary
        self.kept: list = []  # Dynamo holds on to the backend, which must not hold the model
        self.run = _compiled(_run_layers, functools.partial(_inductor_keeping, self.kept))

    def _first(self, x: Tensor, *rest: Tensor) -> Tensor:
        calls = []
        for group in self.groups:
            y = self.run(group, x, *rest)
            graph, inputs = self.kept
            self.kept.clear()
            ids = [id(tensor) for tensor in inputs]
            calls.append((graph, inputs, [ids.index(id(tensor)) for tensor in (x, *rest)]))
            x = y
        self.calls, self.shape = calls, x.shape
        return x

    def __call__(self, x: Tensor, *rest: Tensor) -> Tensor:
        """x through all layers; rest: start, cos, sin."""
        if not self.calls:
            return self._first(x, *rest)
        if self.attention.cache is not self.cache or x.shape != self.shape:
            raise ValueError("a compiled decode step keeps its caches and its batch: make a new Engine")
        for graph, inputs, places in self.calls:
            for place, tensor in zip(places, (x, *rest), strict=True):
                inputs[place] = tensor
            x, = graph(*inputs)
        return x


def compile_decode(model: Transformer) -> Callable[..., Tensor]:
    """_decode_step of `model`, compiled.

    On CUDA the whole step is one graph, which CUDA graphs replay.  On the CPU one graph of a few layers
    serves all of them, one group after the other: as fast, and compiled in a third of the time.
    """
    if model.norm.weight.device.type == "cuda":
        return _compiled(_decode_step, **{"triton.cudagraphs": True})
    count = len(model.layers)
    run = _Groups(model.layers, max(n for n in range(1, GROUP_LAYERS + 1) if count % n == 0))

    def decode_step(model: Transformer, sampler: Sampler, token: Tensor, start: Tensor) -> Tensor:
        x, cos, sin = model.begin(token[:, None], start)
        x = run(x, start, cos, sin)
        return sampler(model.lm_head(model.norm(x)[:, -1]))

    return decode_step


def check_limits(prompt_tokens: int, max_new_tokens: int, cache_size: int, config: ModelConfig) -> None:
    """ValueError, with the numbers and the flag that helps, when a run would leave the cache or the model."""
    need, most = prompt_tokens + max_new_tokens, config.max_position_embeddings
    if prompt_tokens < 1:
        raise ValueError("the prompt has no tokens; give --prompt some text")
    if max_new_tokens < 0:
        raise ValueError(f"--max_new_tokens is {max_new_tokens}; give 0 or more")
    if need > most:
        raise ValueError(f"prompt of {prompt_tokens} + {max_new_tokens} new tokens = {need} > {most} "
                         "positions of the model (max_position_embeddings); shorten the prompt, or "
                         "--max_new_tokens")
    if cache_size > most:
        raise ValueError(f"--cache_size {cache_size} > {most} positions of the model "
                         f"(max_position_embeddings); give --cache_size {most} or less")
    if need > cache_size:
        raise ValueError(f"prompt of {prompt_tokens} + {max_new_tokens} new tokens = {need} > cache of "
                         f"{cache_size} slots; give --cache_size {need} or a smaller --max_new_tokens")


@dataclass
class Timing:
    """Seconds of one generation.  decode_s covers `decode_steps` steps and none of the prefill."""
    prefill_s: float = 0.0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    fed: int = 0  # tokens that prefill computed
    depth: int = 0  # tokens in the cache when decoding began


@dataclass
class Engine:
    """A model and fresh caches of `cache_size` slots, with its prefill and decode steps, compiled or not.

    Compiled: one graph for decode (compile_decode); for prefill one for the chunk and one, dynamic, for what
    is left of a prompt (two more if that is under quantize.MANY_ROWS tokens, or one token).  Decode drops the
    guards on modules: for other caches make a new engine.
    """
    model: Transformer
    spec: CacheSpec
    cache_size: int
    causal_mask: str = "none"
    sampler: Sampler = greedy
    batch: int = 1
    prefill_chunk: int = 512
    cache_class: type[KVCache] = KVCache
    compile: bool = False
    compile_prefill: bool = False
    calibrated: bool = True  # fit the bases of a 4-bit cache to the model (a prefill of 1024 tokens)
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.device = self.model.norm.weight.device
        attach_caches = attach_calibrated if self.calibrated else attach
        attach_caches(self.model, self.spec, self.batch, self.cache_size, self.causal_mask, self.cache_class)
        self._decode, self._forward = _decode_step, self.model
        if self.compile:
            self._decode = compile_decode(self.model)
        if self.compile_prefill:
            self._forward = torch.compile(self.model, options=vector_options())

    @torch.inference_mode()
    def warm_up(self) -> float:
        """Compile what is to be compiled; seconds.  Writes slots that the first prefill overwrites."""
        began = time.perf_counter()
        token = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        if self.compile:
            for _ in range(2):
                self._decode(self.model, self.sampler, token, torch.zeros_like(token))
        if self.compile_prefill:
            chunk = min(self.prefill_chunk, self.cache_size)
            for T in {chunk, chunk - 1 or 1}:
                self._forward(token[:, None].expand(-1, T).contiguous(), torch.zeros_like(token))
        self._wait()
        return time.perf_counter() - began

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, start: int = 0, progress: Callable = iter) -> Tensor:
        """Feed tokens [B, P] that stand at start .. start+P-1; logits [B, V] after the last one."""
        logits = None
        for lo in progress(range(0, tokens.shape[1], self.prefill_chunk)):
            at = at_position(start + lo, self.batch, self.device)
            logits = self._forward(tokens[:, lo:lo + self.prefill_chunk], at)
        return logits

    @torch.inference_mode()
    def decode(self, token: Tensor, start: Tensor) -> Tensor:
        """The tokens [B] after token [B], which stands at start [B]."""
        return self._decode(self.model, self.sampler, token, start).clone()

    @torch.inference_mode()
    def assume_filled(self, count: int) -> None:
        """Fill the first `count` slots with random contents: depth without the price of its prefill."""
        config = self.model.config
        shape = (self.batch, config.n_kv_heads, min(count, 4096), config.head_dim)
        k, v = torch.randn(2, *shape, dtype=self.model.norm.weight.dtype, device=self.device)
        for layer in self.model.layers:
            for lo in range(0, count, 4096):
                at = at_position(lo, self.batch, self.device)
                n = min(4096, count - lo)
                layer.attention.cache.write(at, k[:, :, :n], v[:, :, :n])

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, stop_ids: Collection[int] = (), start: int = 0,
                 progress: Callable = iter) -> Iterator[int]:
        """Feed `prompt` at position `start`, then yield up to `max_new_tokens` tokens, a stop token included.

        `timing` tells what it took.  One row (batch 1).
        """
        timing = self.timing = Timing(fed=len(prompt), depth=start + len(prompt))
        began = time.perf_counter()
        logits = self.prefill(torch.tensor([prompt], device=self.device), start, progress)
        self._wait()
        timing.prefill_s = time.perf_counter() - began
        if max_new_tokens == 0:
            return
        token = self.sampler(logits)
        at = torch.tensor([timing.depth], device=self.device)
        value = token.item()
        timing.time_to_first_token_s = time.perf_counter() - began
        yield value
        for _ in range(max_new_tokens - 1):
            if value in stop_ids:
                return
            began = time.perf_counter()
            token = self.decode(token, at)
            at += 1
            value = token.item()
            timing.decode_s += time.perf_counter() - began
            timing.decode_steps += 1
            yield value

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

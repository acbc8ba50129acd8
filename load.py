"""A model in memory, from a checkpoint or from random numbers, never holding its weights twice.

The transformer is built without storage, then filled one layer at a time: a layer's tensors are read from the
mapped file, moved, packed, and their pages dropped before the next.  With `quantization` given, the
full-precision weights of one layer are all that ever stands beside the packed ones.
"""
import ctypes
import mmap
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import quantize
from cpu_extension import HugePages, separate_allocations
from model import ModelConfig, Transformer, refuse_pointer

Progress = Callable[[Iterable], Iterable]  # such as tqdm; shows how far a loop is
MakeLinear = Callable[..., nn.Module]  # such as quantize.linear


class CheckpointSource:
    """Tensors of a mapped model.pth, each given out once; `release` lets its pages leave memory."""
    borrows = True  # its tensors are the file's, to be copied

    def __init__(self, path: Path, quantization: str | None, tied: bool = False) -> None:
        """tied: lm_head may be missing, it is the embedding."""
        quantize.check_scheme(quantization)
        if not path.is_file():
            raise ValueError(f"no checkpoint at {path}; convert one first (see README.md)")
        self.path, self.tied = path, tied
        self.state = self._open()
        stored = self.state.get(quantize.SCHEME_KEY)
        if stored and quantization not in (None, stored):
            raise ValueError(f"{path} is stored as {stored}; it cannot become {quantization}")
        self.packed, self.scheme = stored is not None, stored or quantization

    def _open(self) -> dict:
        refuse_pointer(self.path)
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:  # torch's own message advises to load it unsafely
            state = None
        except (RuntimeError, OSError) as e:
            reason = str(e).splitlines()[0]
            raise ValueError(f"{self.path} is no checkpoint that torch can read: {reason}") from e
        if not isinstance(state, dict) or not all(
                isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
                if name != quantize.SCHEME_KEY):
            raise ValueError(f"{self.path} is damaged or holds more than named tensors; convert it again")
        return state

    def __call__(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        prefix = f"{name}."
        keys = [key for key in self.state if key.startswith(prefix)]
        found = {key.removeprefix(prefix): self.state.pop(key) for key in keys}
        if not found and name == "lm_head" and self.tied and "embed.weight" in self.state:
            found = {"weight": self.state["embed.weight"]}
        needed = [key for key in ("weight", "bias") if getattr(module, key, None) is not None]
        missing = [prefix + key for key in needed if key not in found]
        if missing:
            raise ValueError(f"{self.path} lacks {missing[0]}; its config.json may belong to another model")
        shape, want = tuple(found["weight"].shape), tuple(module.weight.shape)
        if shape != want and not (self.packed and isinstance(module, nn.Linear)):
            raise ValueError(f"{self.path}: {prefix}weight is {shape}, but config.json says {want}")
        return found

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Drop the file's pages of tensors that have been read; reading them again would bring them back."""
        if not hasattr(mmap, "MADV_DONTNEED") or is_in_torch_dispatch_mode():  # fake tensors have no address
            return
        for tensor in tensors:
            first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only
            size = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class RandomSource:
    """Random tensors of the right shapes, made directly in the packed form."""
    borrows = False

    def __init__(self, quantization: str | None, device: torch.device | str, dtype: torch.dtype) -> None:
        quantize.check_scheme(quantization)
        self.scheme, self.packed = quantization, quantization is not None
        self.device, self.dtype, self.memory = device, dtype, HugePages()

    def __call__(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        if isinstance(module, nn.RMSNorm):
            return {"weight": torch.ones(module.weight.shape, dtype=self.dtype, device=self.device)}
        made = {}
        if isinstance(module, nn.Linear) and self.packed:
            made = quantize.pack_random(module.out_features, module.in_features, self.scheme, self.device)
        else:
            weight = self.memory.empty(module.weight.shape, self.dtype, self.device)
            made["weight"] = weight.normal_(std=module.weight.shape[1] ** -0.5)
        if getattr(module, "bias", None) is not None:
            made["bias"] = torch.zeros(module.bias.shape, dtype=self.dtype, device=self.device)
        return made

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: the model keeps them."""


def load_checkpoint(path: Path, config: ModelConfig, device: torch.device | str = "cpu",
                    dtype: torch.dtype = torch.bfloat16, quantization: str | None = None,
                    progress: Progress = iter, make_linear: MakeLinear = quantize.linear) -> Transformer:
    """The model of `path`, quantized on the way when `quantization` says so.  ValueError for a bad file."""
    with separate_allocations():
        source = CheckpointSource(path, quantization, config.tie_word_embeddings)
        model = _fill(config, source, device, dtype, progress, make_linear)
    if left := sorted(source.state.keys() - {quantize.SCHEME_KEY}):
        raise ValueError(f"{path} holds {left[0]}, for which its config.json has no place; it may belong to "
                         "another model")
    return model


def random_model(config: ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
                 quantization: str | None = None, progress: Progress = iter,
                 make_linear: MakeLinear = quantize.linear) -> Transformer:
    """A model of random weights, to time and to weigh an architecture without its checkpoint."""
    with separate_allocations():
        source = RandomSource(quantization, device, dtype)
        return _fill(config, source, device, dtype, progress, make_linear)


class _NoInit(TorchFunctionMode):
    """Skips torch.nn.init: on `meta` a single normal_ imports 150 MB of torch's Python, for nothing."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _fill(config: ModelConfig, source: CheckpointSource | RandomSource, device: torch.device | str,
          dtype: torch.dtype, progress: Progress, make_linear: MakeLinear) -> Transformer:
    with torch.device("meta"), _NoInit():
        model = Transformer(config)
    memory = HugePages()
    leaves = {name: module for name, module in model.named_modules()
              if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm))}
    shares_embedding = config.tie_word_embeddings and source.scheme is None
    large = ["lm_head", "embed"]  # first, while all else is empty: their files pages are the peak of loading
    for name in progress([name for name in large + [n for n in leaves if n not in large] if name in leaves]):
        if name == "lm_head" and shares_embedding:
            continue
        tensors = source(name, leaves[name])
        if isinstance(leaves[name], nn.Linear) and source.scheme is not None:
            packed, bias = _packed(tensors, source, device, dtype)
            tensors = None  # the file's, before the kernels' own order is made
            model.set_submodule(name, make_linear(packed, source.scheme, bias))
        else:
            for key, value in tensors.items():
                new = memory.empty(value.shape, dtype, device).copy_(value) if source.borrows else value
                setattr(leaves[name], key, nn.Parameter(new, requires_grad=False))
            source.release(tensors.values())
        value = new = tensors = packed = None  # before the next layer's
    if shares_embedding:
        model.lm_head.weight = model.embed.weight
    return model.eval()


def _packed(tensors: dict[str, Tensor], source: CheckpointSource | RandomSource,
            device: torch.device | str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None]:
    """A quantized layer's tensors and bias on the device; the source's own are released."""
    given = list(tensors.values())
    bias = tensors.pop("bias", None)
    bias = None if bias is None else bias.to(device, dtype, copy=True)
    if not source.packed:
        tensors = quantize.pack(tensors["weight"].to(device), source.scheme)
    elif source.borrows:
        tensors = {key: value.to(device, copy=True) for key, value in tensors.items()}
    source.release(given)
    return tensors, bias

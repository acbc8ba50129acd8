"""Write a model.pth of known shapes piece by piece, in the memory of one piece; what both converters share.

`checkpoint_parts` says where each tensor of a Hugging Face Llama goes in ours (q, k, v and gate, up are
fused), and `CheckpointWriter` makes the file: first a torch.save'd skeleton without contents, then the bytes
in their places.  The file appears under its name only when every byte is there.  torch.load reads it in every
mode (weights_only, mmap); only the zip checksums, which torch.load never looks at, are not filled in.
"""
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from model import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHUNK_ELEMENTS = 1 << 22  # converted and written at a time: 16 MB of float32


@dataclass(frozen=True)
class Part:
    """The place of one source tensor: rows first_row .. first_row + shape[0] - 1 of the tensor `target`."""
    target: str
    first_row: int
    shape: tuple[int, ...]


def checkpoint_parts(config: ModelConfig) -> dict[str, Part]:
    """Every tensor of a Hugging Face Llama with this config, by its name there, and its place in ours."""
    dim, inner = config.dim, config.intermediate_size
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    linears = [  # target, sources (name, rows), columns, bias
        ("attention.wqkv", [("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows),
                            ("self_attn.v_proj", kv_rows)], dim, config.attention_bias),
        ("attention.wo", [("self_attn.o_proj", dim)], q_rows, config.attention_bias),
        ("mlp.w_gate_up", [("mlp.gate_proj", inner), ("mlp.up_proj", inner)], dim, config.mlp_bias),
        ("mlp.w_down", [("mlp.down_proj", dim)], inner, config.mlp_bias)]
    parts = {"model.embed_tokens.weight": Part("embed.weight", 0, (config.vocab_size, dim))}
    for i in range(config.n_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        parts[f"{theirs}.input_layernorm.weight"] = Part(f"{ours}.attention_norm.weight", 0, (dim,))
        parts[f"{theirs}.post_attention_layernorm.weight"] = Part(f"{ours}.mlp_norm.weight", 0, (dim,))
        for target, sources, columns, bias in linears:
            first_row = 0
            for source, rows in sources:
                for kind, shape in [("weight", (rows, columns))] + [("bias", (rows,))] * bias:
                    parts[f"{theirs}.{source}.{kind}"] = Part(f"{ours}.{target}.{kind}", first_row, shape)
                first_row += rows
    parts["model.norm.weight"] = Part("norm.weight", 0, (dim,))
    if not config.tie_word_embeddings:
        parts["lm_head.weight"] = Part("lm_head.weight", 0, (config.vocab_size, dim))
    return parts


def check_tensors(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """ValueError that names the tensors a file lacks, has too many, or has in a shape its config denies."""
    for problem, names in (("lacks", expected.keys() - found.keys()),
                           ("has unexpected tensors:", found.keys() - expected.keys())):
        if names:
            shown, more = sorted(names)[:4], len(names) - 4
            tail = f" and {more} more" if more > 0 else ""
            raise ValueError(f"the checkpoint {problem} {', '.join(shown)}{tail}; is this its config?")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{name} has shape {list(found[name])}, but the config says {list(shape)}")


def fused_dtypes(parts: dict[str, Part], dtypes: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
    """The dtype of each target: that of its sources, or the one that holds them all."""
    by_target: dict[str, list[torch.dtype]] = {}
    for name, part in parts.items():
        by_target.setdefault(part.target, []).append(dtypes[name])
    return {target: functools.reduce(torch.promote_types, kinds) for target, kinds in by_target.items()}


class CheckpointWriter:
    """A context in which model.pth is filled; it appears at the end, and only if nothing failed.

    path: the file to make; it grows beside as path + ".partial", which a failure removes.
    parts: what will be written (checkpoint_parts); dtypes: the dtype of each target tensor (fused_dtypes).
    """

    def __init__(self, path: str | Path, parts: dict[str, Part], dtypes: dict[str, torch.dtype]) -> None:
        self.path, self.parts, self.dtypes = Path(path), parts, dtypes
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for part in parts.values():
            rows = part.first_row + part.shape[0]
            rows = max(rows, self.shapes.get(part.target, (0,))[0])
            self.shapes[part.target] = (rows, *part.shape[1:])
        self.missing = {name: math.prod(part.shape) for name, part in parts.items()}  # elements to come

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors together."""
        return sum(math.prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def __enter__(self) -> "CheckpointWriter":
        try:
            with torch.serialization.skip_data():  # these tensors are never touched, so they take no memory
                torch.save({name: torch.empty(shape, dtype=self.dtypes[name])
                            for name, shape in self.shapes.items()}, self.partial)
            with FakeTensorMode():
                skeleton = torch.load(self.partial, weights_only=True)
            self.offsets = {n: t.untyped_storage()._checkpoint_offset for n, t in skeleton.items()}
            self.file = open(self.partial, "r+b", buffering=0)
        except BaseException:
            self.partial.unlink(missing_ok=True)
            raise
        return self

    def write(self, name: str, tensor: Tensor, row: int = 0) -> int:
        """Put `tensor`, the rows from `row` on of source `name`, into its place; returns bytes written.

        ValueError when a number does not fit the target's dtype.
        """
        part = self.parts[name]
        dtype, shape = self.dtypes[part.target], self.shapes[part.target]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.file.seek(self.offsets[part.target] + (part.first_row + row) * row_bytes)
        for chunk in tensor.reshape(-1).split(CHUNK_ELEMENTS):
            converted = chunk.to(dtype)
            if dtype == torch.float16 and not converted.isfinite().all():
                raise ValueError(f"{name} has numbers outside the range of float16; use --dtype bfloat16")
            self._write_bytes(converted.contiguous().view(torch.uint8).numpy().data)
        self.missing[name] -= tensor.numel()
        return tensor.numel() * dtype.itemsize

    def _write_bytes(self, data: memoryview) -> None:
        while data:  # an unbuffered write may take less than it was given
            data = data[self.file.write(data):]

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        try:
            if kind is None:
                left = [name for name, elements in self.missing.items() if elements]
                assert not left, f"written in part or twice: {left}"
                os.fsync(self.file.fileno())
            self.file.close()
            if kind is None:
                os.replace(self.partial, self.path)
        finally:
            self.file.close()
            self.partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small UTF-8 file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

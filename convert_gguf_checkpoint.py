"""Turn a GGUF file of the llama architecture into a folder of model.pth, config.json and tokenizer files.

    python convert_gguf_checkpoint.py SmolLM2-135M-Instruct.Q4_1.gguf --output_dir checkpoints/SmolLM2

Tensors are dequantized piece by piece (the `gguf` package), so memory stays small; q and k rows, which GGUF
keeps in interleaved order, are put back into the half-split order of Hugging Face.
"""
import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from checkpoint_writer import (
    CHUNK_ELEMENTS,
    DTYPES,
    CheckpointWriter,
    check_tensors,
    checkpoint_parts,
    fused_dtypes,
    write_text,
)
from gguf_tokenizer import build_tokenizer, stop_ids, token_id, tokenizer_settings
from model import ModelConfig, RopeScaling, refuse_pointer, rope_frequencies

NAMES = (  # Hugging Face's name -> GGUF's, as replacements in this order
    ("model.embed_tokens.", "token_embd."), ("model.layers.", "blk."), ("model.norm.", "output_norm."),
    ("lm_head.", "output."), ("self_attn.q_proj.", "attn_q."), ("self_attn.k_proj.", "attn_k."),
    ("self_attn.v_proj.", "attn_v."), ("self_attn.o_proj.", "attn_output."), ("mlp.gate_proj.", "ffn_gate."),
    ("mlp.up_proj.", "ffn_up."), ("mlp.down_proj.", "ffn_down."), ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."))

KEYS = {  # GGUF's key -> that of a config.json with the same meaning
    "llama.embedding_length": "hidden_size", "llama.block_count": "num_hidden_layers",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads", "llama.attention.key_length": "head_dim",
    "llama.feed_forward_length": "intermediate_size", "llama.context_length": "max_position_embeddings",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps", "llama.rope.freq_base": "rope_theta",
    "llama.attention.sliding_window": "sliding_window", "llama.attention.scale": "attention_multiplier",
    "llama.logit_scale": "logits_scaling", "llama.embedding_scale": "embedding_multiplier",
    "llama.residual_scale": "residual_multiplier", "llama.attn_logit_softcapping": "attn_logit_softcapping",
    "llama.final_logit_softcapping": "final_logit_softcapping",
    "llama.attention.clamp_kqv": "clip_qkv"}
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "max_position_embeddings", "rms_norm_eps")
HARMLESS = {  # or looked at elsewhere in this file
    "llama.vocab_size", "llama.expert_count", "llama.expert_used_count", "llama.attention.value_length",
    "llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor",
    "llama.rope.scale_linear", "llama.rope.scaling.original_context_length", "llama.rope.scaling.finetuned",
    "llama.tensor_data_layout"}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor: model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight."""
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors (gguf's ReaderTensor, memory-mapped) of a file, each by name."""
    try:
        import gguf
    except ImportError as e:
        raise ValueError("reading GGUF needs the gguf package: pip install gguf") from e
    if not path.is_file():
        raise ValueError(f"no file {path}")
    refuse_pointer(path)
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is no GGUF file that can be read ({e}); fetch it again") from e
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def read_config(metadata: dict[str, Any], tensors: dict[str, Any]) -> ModelConfig:
    """The architecture as metadata and tensors state it.  ValueError when it is not a Llama's."""
    for key, only in (("general.architecture", "llama"), ("general.type", "model")):
        if metadata.get(key, only) != only:
            raise ValueError(f"{key} {metadata[key]!r} is not supported; supported: {only}")
    if metadata.get("llama.expert_count", 0):
        raise ValueError("this is a mixture of experts, which is not supported; supported: dense llama")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ValueError("this file is one part of several; join them first (llama-gguf-split --merge)")
    if "token_embd.weight" not in tensors:
        raise ValueError("the checkpoint lacks token_embd.weight; is this a vocabulary only?")
    facts = {theirs: required(metadata, ours) for ours, theirs in KEYS.items()
             if ours in metadata or theirs in REQUIRED}
    facts |= {key: value for key, value in metadata.items()  # ModelConfig names them as unknown
              if key.startswith("llama.") and key not in KEYS and key not in HARMLESS}
    facts["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    for key, digits in (("rms_norm_eps", ".6g"), ("rope_theta", ".9g")):  # stored as float32
        if isinstance(facts.get(key), float):
            facts[key] = float(f"{facts[key]:{digits}}")
    plain = ModelConfig.from_dict({
        **facts, "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors})
    widths = [metadata.get(f"llama.{key}", plain.head_dim)
              for key in ("rope.dimension_count", "attention.value_length")]
    if widths != [plain.head_dim] * 2:
        raise ValueError(f"rotary or value width differs from head_dim {plain.head_dim}; not supported")
    return dataclasses.replace(plain, rope_scaling=rope_scaling(metadata, tensors, plain))


def required(metadata: dict[str, Any], key: str) -> Any:
    """metadata[key], one number for the whole model; ValueError when it is missing or differs by layer."""
    if key not in metadata:
        raise ValueError(f"the file lacks {key}; it is no complete model")
    if isinstance(metadata[key], list):
        raise ValueError(f"{key} differs from layer to layer, which is not supported")
    return metadata[key]


def rope_scaling(metadata: dict[str, Any], tensors: dict[str, Any],
                 plain: ModelConfig) -> RopeScaling | None:
    """`linear` stands in the metadata, `llama3` as the tensor rope_freqs.weight, a divisor per frequency."""
    kind = metadata.get("llama.rope.scaling.type", "linear")  # files from before the key existed
    if kind not in ("none", "linear"):
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: none, linear")
    factor = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear", 1.0))
    scaled = kind == "linear" and factor not in (0.0, 1.0)
    linear = RopeScaling.from_dict({"type": "linear", "factor": factor}) if scaled else None
    if "rope_freqs.weight" not in tensors:
        return linear
    divisors = dequantize_rows(tensors["rope_freqs.weight"], 0, None).astype(np.float64)  # [D/2]
    if divisors.shape != (plain.head_dim // 2,):
        raise ValueError(f"rope_freqs.weight has {divisors.size} divisors for head_dim {plain.head_dim}")
    if np.allclose(divisors, 1):
        return linear
    if linear:
        raise ValueError("rope_freqs.weight together with linear rope scaling is not supported")
    return llama3_scaling(divisors, plain)


def llama3_scaling(divisors: np.ndarray, plain: ModelConfig) -> RopeScaling:
    """The llama3 numbers whose divisors [D/2] these are; ValueError when there are none.

    Between the two limits 1/divisor = blend + (1 - blend) / factor, and blend is linear in the frequency (see
    model.rope_frequencies), so two points there give the numbers but for a multiple: low_freq_factor is 1.
    """
    factor = round(float(divisors.max()), 4)
    frequencies = rope_frequencies(plain).double().numpy()
    candidates = [RopeScaling("llama3", factor, 1.0, 4.0, 8192)]
    blend = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (blend > 1e-4) & (blend < 1 - 1e-4)
    if between.sum() >= 2:
        slope, offset = np.polyfit(frequencies[between] / (2 * np.pi), blend[between], 1)
        if offset < 0:
            high, original = 1 - 1 / offset, -slope / offset
            candidates.append(RopeScaling("llama3", factor, 1.0, round(high, 3), round(original)))
    for scaling in candidates:
        scaled = rope_frequencies(ModelConfig(**{**vars(plain), "rope_scaling": scaling})).double().numpy()
        if np.allclose(frequencies / scaled, divisors, rtol=1e-3):
            return scaling
    raise ValueError("rope_freqs.weight is not llama3's scaling; other frequency tables are not supported")


def dequantize_rows(tensor: Any, first: int, last: int | None) -> np.ndarray:
    """Rows first .. last-1 of a tensor as float32 [rows, columns] ([rows] for a vector)."""
    from gguf.quants import dequantize
    try:
        return dequantize(tensor.data[first:last], tensor.tensor_type)
    except NotImplementedError as e:
        raise ValueError(f"{tensor.name} is {tensor.tensor_type.name}, which gguf cannot dequantize; "
                         "take another quantization of the model") from e


def half_split(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Whole heads of q or k from GGUF's interleaved row order (pairs side by side) to the half-split one."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def write_model(path: Path, config: ModelConfig, tensors: dict[str, Any], dtype: torch.dtype) -> None:
    """Dequantize every tensor into model.pth, some heads or rows at a time."""
    parts = checkpoint_parts(config)
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()
              if name != "rope_freqs.weight"}  # it is in the config
    check_tensors({gguf_name(name): part.shape for name, part in parts.items()}, shapes)
    with CheckpointWriter(path, parts, fused_dtypes(parts, dict.fromkeys(parts, dtype))) as writer, \
            tqdm(total=writer.nbytes, unit="B", unit_scale=True, desc="convert", mininterval=0.5) as progress:
        for name, part in parts.items():
            columns = part.shape[1] if len(part.shape) == 2 else 1
            heads = max(1, CHUNK_ELEMENTS // (columns * config.head_dim))  # q and k in whole heads
            step = heads * config.head_dim
            for first in range(0, part.shape[0], step):
                rows = dequantize_rows(tensors[gguf_name(name)], first, first + step)
                if ".q_proj." in name or ".k_proj." in name:
                    rows = half_split(rows, config.head_dim)
                rows = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
                progress.update(writer.write(name, rows, first))


def write_descriptions(folder: Path, config: ModelConfig, metadata: dict[str, Any], dtype: str) -> None:
    """config.json, generation_config.json and the tokenizer, in the format of Hugging Face."""
    tokenizer = build_tokenizer(metadata)
    stops = stop_ids(metadata)
    ids = {"bos_token_id": token_id(metadata, "bos"), "eos_token_id": stops or None,
           "pad_token_id": token_id(metadata, "padding")}
    if len(stops) == 1:
        ids["eos_token_id"] = stops[0]
    ids = {name: value for name, value in ids.items() if value is not None}
    files = {"config.json": {**config.to_dict(), **ids, "torch_dtype": dtype}, "generation_config.json": ids,
             "tokenizer_config.json": {**tokenizer_settings(metadata),
                                       "model_max_length": config.max_position_embeddings}}
    for name, contents in files.items():
        write_text(folder / name, json.dumps(contents, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))


def convert(path: str | Path, folder: str | Path | None = None, dtype: str = "bfloat16") -> Path:
    """Convert the GGUF file `path` into `folder` and return the path of its model.pth.

    folder: made if needed; default: beside the file, named like it.  dtype: bfloat16, float16 or float32.
    ValueError when the file cannot be converted; model.pth comes last, so it marks a finished conversion.
    """
    path = Path(path)
    folder = Path(folder) if folder else path.with_suffix("")
    metadata, tensors = open_gguf(path)
    try:
        config = read_config(metadata, tensors)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    print(config.notes, end="", file=sys.stderr)
    if folder == path:
        raise ValueError(f"{path} has no suffix to name the folder by; give --output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    write_descriptions(folder, config, metadata, dtype)
    write_model(folder / "model.pth", config, tensors, DTYPES[dtype])
    return folder / "model.pth"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("--output_dir", type=Path, help="default: a folder beside, named like the file")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16",
                        help="number type of the weights")
    args = parser.parse_args()
    print(f"reading {args.file}", file=sys.stderr)  # a large vocabulary takes gguf some seconds
    try:
        path = convert(args.file, args.output_dir, args.dtype)
    except (ValueError, OSError) as e:
        print(f"convert_gguf_checkpoint.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(path)


if __name__ == "__main__":
    main()

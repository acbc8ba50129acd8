"""Turn a Hugging Face folder of a Llama model into model.pth, beside its config.json and tokenizer files.

    python convert_hf_checkpoint.py --checkpoint_dir checkpoints/Llama-3.2-1B

config.json decides everything.  Weights: safetensors or pytorch_model.bin, whole or sharded, with or without
the index file.  Sources are memory-mapped and written tensor by tensor, one shard open at a time.
"""
import argparse
import pickle
import re
import sys
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from checkpoint_writer import DTYPES, CheckpointWriter, check_tensors, checkpoint_parts, fused_dtypes
from model import ModelConfig, read_json, refuse_pointer, shown


def find_shards(folder: Path) -> list[Path]:
    """The weight files, safetensors before .bin: one file, what the index lists, or shards by name."""
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
        if single.is_file():
            return [single]
        names = indexed_shards(index) if index.is_file() else numbered_shards(folder, stem, suffix)
        there = {path.name for path in folder.iterdir() if path.is_file()}
        missing = [shown(name) for name in names if name not in there]
        if missing:
            listed = f" that weight_map in {index.name} lists" if index.is_file() else ""
            raise ValueError(f"{folder} lacks {', '.join(missing[:4])}{listed}; fetch it and convert again")
        if names:
            return [folder / name for name in names]
    raise ValueError(f"no weights in {folder}; expected model*.safetensors or pytorch_model*.bin")


def indexed_shards(index: Path) -> list[str]:
    """The names, in its own folder, that an index (model.safetensors.index.json) lists; ValueError else."""
    homes = read_json(index).get("weight_map")  # name of a tensor -> name of its file
    names = list(homes.values()) if isinstance(homes, dict) else []
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong or not names:
        found = shown(wrong[0] if wrong else homes)
        raise ValueError(f"{index}: weight_map holds {found}; expected an object of tensor names and file "
                         "names in this folder; fetch the index again")
    return sorted(set(names))


def numbered_shards(folder: Path, stem: str, suffix: str) -> list[str]:
    """The full series (those that are not there, too) that the names stem-00001-of-00003 speak of; or []."""
    pattern = re.compile(rf"{stem}-\d+-of-(\d+){re.escape(suffix)}")
    totals = {match[1] for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if len(totals) > 1:
        raise ValueError(f"{folder} mixes shards of {' and '.join(sorted(totals))} files; keep one series")
    return [f"{stem}-{i:0{len(total)}d}-of-{total}{suffix}"
            for total in totals for i in range(1, int(total) + 1)]


def read_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, memory-mapped, so that nothing is read before it is used."""
    refuse_pointer(path)
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as f:
                return {name: f.get_tensor(name) for name in f.keys()}
        # Files from before torch 1.6 are no zip and cannot be mapped.
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
        if not isinstance(state, dict) or not all(isinstance(name, str) and isinstance(value, Tensor)
                                                  for name, value in state.items()):
            raise pickle.UnpicklingError("not only tensors")
        return state
    except pickle.UnpicklingError as e:  # torch's own message advises to load it unsafely
        raise ValueError(f"{path} is damaged or holds more than tensors; fetch safetensors") from e
    except (SafetensorError, RuntimeError, EOFError) as e:
        raise ValueError(f"{path} cannot be read ({str(e).splitlines()[0]}); fetch it again") from e


def survey(shards: list[Path], config: ModelConfig) -> dict[str, torch.dtype]:
    """The dtype of each tensor, after checking that the files together hold what the config says."""
    shapes, homes, dtypes = {}, {}, {}
    for shard in shards:
        for name, tensor in read_shard(shard).items():
            if name.endswith("rotary_emb.inv_freq"):  # computed from the config
                continue
            if name in homes:
                raise ValueError(f"{name} is in {homes[name].name} and {shard.name}; remove the stale file")
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"{name} is {tensor.dtype}; quantized checkpoints are not supported, "
                                 f"only {', '.join(DTYPES)}")
            shapes[name], homes[name], dtypes[name] = tuple(tensor.shape), shard, tensor.dtype
    if config.tie_word_embeddings and "lm_head.weight" in homes:
        check_tied(homes)
        del shapes["lm_head.weight"]
    check_tensors({name: part.shape for name, part in checkpoint_parts(config).items()}, shapes)
    return dtypes


def check_tied(homes: dict[str, Path]) -> None:
    """ValueError when a tied checkpoint has an output matrix of its own."""
    names = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in homes]
    tensors = [read_shard(homes[name])[name] for name in names]
    if len(tensors) == 2 and not torch.equal(*tensors):
        raise ValueError("config.json says tie_word_embeddings, but lm_head.weight is not the embedding; "
                         "set it to false there")


def convert(folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write folder/model.pth and return its path.

    dtype: of the result; None keeps what the file has.  ValueError when the folder is not a Llama checkpoint,
    or its weights are not what its config.json says.
    """
    folder = Path(folder)
    config = ModelConfig.from_json(folder / "config.json")
    print(config.notes, end="", file=sys.stderr)
    shards = find_shards(folder)
    found_dtypes = survey(shards, config)
    parts = checkpoint_parts(config)
    dtypes = fused_dtypes(parts, {name: dtype or found_dtypes[name] for name in parts})
    with CheckpointWriter(folder / "model.pth", parts, dtypes) as writer, \
            tqdm(total=writer.nbytes, unit="B", unit_scale=True, desc="convert", mininterval=0.5) as progress:
        for shard in shards:
            for name, tensor in read_shard(shard).items():
                if name in parts:
                    progress.update(writer.write(name, tensor))
    return writer.path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint_dir", type=Path, required=True,
                        help="folder with config.json and the weights; model.pth goes into it")
    parser.add_argument("--dtype", choices=list(DTYPES), help="number type; default: the file's own")
    args = parser.parse_args()
    try:
        path = convert(args.checkpoint_dir, DTYPES.get(args.dtype))
    except (ValueError, OSError) as e:
        print(f"convert_hf_checkpoint.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(path)


if __name__ == "__main__":
    main()

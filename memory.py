"""What a run will take, part by part, before anything is allocated; and what fits in a given memory.

    python memory.py --config configs/Llama-3.1-8B.json --cache_size 131072 \\
        --quantization int4wo-64 --kv_cache_quantization
    python memory.py --config configs/Llama-3.1-8B.json --cache_size 131072 --budget 24

Plain arithmetic on the architecture and the flags: no weights, no device.  memory_formulas.py has the
transients, memory_dry_run.py takes the same figures from the code itself (generate.py --dry_run), and a
test holds both against measured runs.  GB are 1e9 bytes.
"""
import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import memory_formulas as formulas
from backends import DTYPES, cache_spec
from kv_cache import KINDS, CacheSpec
from memory_formulas import Setup
from memory_tracker import Tracker
from model import ModelConfig
from options import PRECISIONS, add_cache_flags, add_quantization_flag, check_cache_flags
from shell import Parser, check_input, errors, number, size, whole

__all__ = ["Plan", "Setup", "Tracker", "available_bytes", "best_that_fits", "longest_context", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """Bytes.  The first group stays; of the second group each part is what it needs while it runs.

    They share the same room: the peak is what stays plus the largest of them, except that the cache does not
    exist yet while loading.
    """
    linears: int  # and norms and biases
    embedding: int
    cache_values: int
    cache_scales: int
    cache_bases: int
    mask: int
    libraries: int  # what Python's and torch's own take in resident memory once they work
    holes: int  # in the C library's heap, once it has served transients
    loading: int  # peak of loading, the weights loaded so far included
    prefill_transients: int
    decode_transients: int
    logits: int

    @property
    def weights_bytes(self) -> int:
        return self.linears + self.embedding

    @property
    def cache_bytes(self) -> int:
        return self.cache_values + self.cache_scales + self.cache_bases

    @property
    def staying_bytes(self) -> int:
        """What stays from the first chunk to the last token."""
        return self.weights_bytes + self.cache_bytes + self.mask + self.libraries + self.holes

    @property
    def parts(self) -> dict[str, int]:
        """What each part adds to the peak: they sum up to total_bytes."""
        names = ("linears", "embedding", "cache_values", "cache_scales", "cache_bases", "mask", "libraries",
                 "holes")
        parts = {name: getattr(self, name) for name in names}
        held = self.staying_bytes
        for name in ("prefill_transients", "decode_transients", "logits", "loading"):
            reach = getattr(self, name) + (self.libraries if name == "loading" else self.staying_bytes)
            parts[name] = max(reach - held, 0)
            held = max(held, reach)
        return parts

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    @property
    def tensor_bytes(self) -> int:
        """The peak of tensors alone, as a dry run counts it."""
        return replace(self, libraries=0, holes=0).total_bytes

    @property
    def phases(self) -> dict[str, int]:
        """The peak of each phase of a run."""
        return {"load": self.loading + self.libraries, "cache": self.staying_bytes,
                "prefill": self.staying_bytes + max(self.prefill_transients, self.logits),
                "decode": self.staying_bytes + max(self.decode_transients, self.logits)}

    def to_dict(self) -> dict:
        """For --json."""
        alone = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"total_bytes": self.total_bytes, "parts": self.parts, "alone": alone, "phases": self.phases}

    def line(self) -> str:
        """One line for a person."""
        parts = {"weights": self.weights_bytes, "cache": self.cache_bytes, "mask": self.mask}
        parts["transients"] = self.total_bytes - sum(parts.values())
        inside = ", ".join(f"{name} {size(n)}" for name, n in parts.items() if n)
        return f"will take {size(self.total_bytes)}: {inside}"


def make_plan(setup: Setup) -> Plan:
    """Bytes of every part of a run."""
    values, scales, bases = formulas.cache(setup)
    linears, embedding = formulas.weights(setup)
    return Plan(
        linears, embedding, values, scales, bases, formulas.mask(setup),
        formulas.libraries(setup), formulas.holes(setup),
        formulas.loading(setup), formulas.prefill(setup), formulas.decode(setup), formulas.logits(setup))


def available_bytes(device: torch.device) -> int | None:
    """Bytes that a run on this device can still get; None when nobody can say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def refusal(setup: Setup, available: int) -> str | None:
    """None when the plan fits in `available` bytes; else a sentence with the flags that would make it fit."""
    plan = make_plan(setup)
    if plan.total_bytes <= available:
        return None
    said = f"{size(plan.total_bytes)} do not fit in the {size(available)} that are free; "
    better = best_that_fits(setup, available)
    shorter = longest_context(setup, available)
    ways = [f"give {scheme_flags(*better)}"] if better else []
    ways += [f"--cache_size {shorter}"] if shorter and shorter < setup.cache_size else []
    return said + (" or ".join(ways) or "nothing makes it fit") + " (--force goes on all the same)"


# ---- budgets ----


def with_scheme(setup: Setup, quantization: str | None, kind: str) -> Setup:
    """The same run with other weights and another kind of cache (a name of kv_cache.KINDS)."""
    spec = CacheSpec.parse(kind, "d" if "4" in KINDS[kind] else setup.spec.axis, dtype=setup.spec.dtype)
    if setup.source == "packed" and quantization != setup.quantization:
        raise ValueError(f"the checkpoint is stored as {setup.quantization}; its weights cannot change")
    return replace(setup, quantization=quantization, spec=spec)


def schemes(setup: Setup) -> list[tuple[str | None, str]]:
    """All pairs of weights and cache, the most accurate first: fewer bits cost less in the cache than in the
    weights."""
    weights = [setup.quantization] if setup.source == "packed" else [None, "int8wo", "int4wo-64"]
    size = (1, setup.config.n_kv_heads, 1, setup.config.head_dim)
    kinds = sorted((kind for kind in KINDS if kind is not None),
                   key=lambda kind: -CacheSpec.parse(kind, dtype=setup.spec.dtype).nbytes(*size))
    return [(w, kind) for w in weights for kind in kinds]


def scheme_flags(quantization: str | None, kind: str) -> str:
    """The flags of generate.py that ask for a scheme."""
    words = [f"--quantization {quantization}"] if quantization else []
    words += [f"--kv_cache_quantization {kind}"] if kind != "none" else []
    return " ".join(words) or "no quantization"


def longest_context(setup: Setup, budget: int) -> int:
    """The most slots, a multiple of 64 and at most the model's positions, that fit; 0 when not even 64 do."""
    def fits(slots: int) -> bool:
        return make_plan(replace(setup, cache_size=slots, prompt_tokens=None)).total_bytes <= budget
    low, high = 0, setup.config.max_position_embeddings // 64
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * 64) else (low, middle - 1)
    return low * 64


def best_that_fits(setup: Setup, budget: int) -> tuple[str | None, str] | None:
    """The first of `schemes` whose plan for the asked context fits; None when none does."""
    for scheme in schemes(setup):
        if make_plan(with_scheme(setup, *scheme)).total_bytes <= budget:
            return scheme
    return None


# ---- tables ----


def plan_table(setup: Setup, plan: Plan) -> str:
    """The parts in GB: what each takes by itself, and what it adds to the peak."""
    rows = [f"{'GB':<22}{'takes':>10}{'adds':>10}"]
    for name, adds in plan.parts.items():
        if takes := getattr(plan, name):
            rows.append(f"{name.replace('_', ' '):<22}{takes / 1e9:>10.3f}{adds / 1e9:>10.3f}")
    rows.append(f"{'peak':<22}{'':>10}{plan.total_bytes / 1e9:>10.3f}")
    slot = plan.cache_bytes / setup.cache_size / setup.batch
    return "\n".join([*rows, f"A token in the cache takes {slot:,.0f} bytes."])


def budget_table(setup: Setup, budget: int) -> str:
    """For each scheme what the asked context takes and the longest context that fits; the best is marked."""
    best = best_that_fits(setup, budget)
    head = f"GB for {setup.cache_size} slots"
    rows = [f"{'weights':<12}{'cache':<8}{head:>24}  fits {size(budget)}{'longest context':>18}"]
    for scheme in schemes(setup):
        other = with_scheme(setup, *scheme)
        total = make_plan(other).total_bytes
        fits = "best" if scheme == best else "yes" if total <= budget else "no"
        names = f"{scheme[0] or '16 bit':<12}{scheme[1].replace('none', '16 bit'):<8}"
        rows.append(f"{names}{total / 1e9:>24.2f}  {fits:<{len(size(budget)) + 5}}"
                    f"{longest_context(other, budget):>18}")
    found = scheme_flags(*best) if best else "nothing holds that context in this memory"
    return "\n".join([*rows, f"Best that fits: {found}."])


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a config.json (see configs/)")
    add_quantization_flag(parser)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda",
                        help="transients differ a little (default %(default)s)")
    parser.add_argument("--batch_size", type=whole(1), default=1, metavar="N",
                        help="rows (default %(default)s)")
    parser.add_argument("--prompt_tokens", type=whole(1), metavar="N",
                        help="default: as many as the cache holds")
    parser.add_argument("--budget", type=number(1e6), metavar="GB",
                        help="compare all schemes with so much memory")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    add_cache_flags(parser)
    return parser


def setup_of(args: argparse.Namespace) -> Setup:
    """The run that the flags describe."""
    check_input("--config", args.config, "a config.json (see configs/)")
    check_cache_flags(args)
    config = ModelConfig.from_json(args.config)
    size = args.cache_size or config.max_position_embeddings
    return Setup(config, cache_spec(args), size, args.quantization, args.batch_size, args.prefill_chunk,
                 args.prompt_tokens, args.causal_mask, DTYPES[args.precision], args.device,
                 kernels=args.attention == "auto")


def budget_dict(setup: Setup, budget: int) -> dict:
    """What budget_table says, for --json."""
    rows = []
    for weights, kind in schemes(setup):
        other = with_scheme(setup, weights, kind)
        rows.append({"quantization": weights, "kv_cache_quantization": kind,
                     "total_bytes": make_plan(other).total_bytes,
                     "longest_context": longest_context(other, budget)})
    best = best_that_fits(setup, budget)
    named = best and dict(zip(("quantization", "kv_cache_quantization"), best, strict=True))
    return {"budget_bytes": budget, "best": named, "schemes": rows}


def main() -> None:
    with errors("memory.py"):
        args = make_parser().parse_args()
        setup = setup_of(args)
        plan, budget = make_plan(setup), int((args.budget or 0) * 1e9)
        if args.json:
            print(json.dumps(plan.to_dict() | (budget_dict(setup, budget) if budget else {})))
        else:
            print(budget_table(setup, budget) if budget else plan_table(setup, plan))
        most = setup.config.max_position_embeddings
        print(setup.config.notes, end="", file=sys.stderr)
        if setup.cache_size > most:
            print(f"note: the model itself has only {most} positions", file=sys.stderr)


if __name__ == "__main__":
    main()

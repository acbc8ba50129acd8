"""Decode attention on the CPU in C++, over the cache of kv_cache.py: integer dot products, all threads at batch 1.

    load()       builds the extension once (about 10 s of compiler, kept under ~/.cache/gpt-long) and loads it;
                 "" when it can be used, else the reason in one line
    CpuKVCache   a KVCache whose write and attend are one C++ operator each; what the kernels do not serve (long T,
                 storage orders whose head_dim is not innermost, float16, mask tables) takes the plain path

The start positions are read inside the operators, so a compiled step is one graph for all positions.  Copy it out with
kv_cache.py, attention_cpu.h, attention_cpu.cpp and attention_cpu_kernels.cpp.
"""
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from kv_cache import KVCache

MAX_TOKENS = 32  # tokens of a call that the kernels take; from there on blocks of GEMMs are faster
MAX_HEAD_DIM = 512  # kMaxHeadDim of the kernels
COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")
X86_KERNELS = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma"),
}
LEVELS = ("portable C++", "AVX2", "AVX-512 VNNI")


def _compile_commands(compiler: str, out: Path) -> list[list[str]]:
    """One compiler call per object file of the extension."""
    here, include = Path(__file__).resolve().parent, Path(torch.__file__).parent / "include"
    x86 = platform.machine() in ("x86_64", "AMD64")
    base = [compiler, *COMMON_FLAGS, "-c"]
    commands = []
    for name, flags in {"portable": (), **(X86_KERNELS if x86 else {})}.items():
        commands.append([*base, "-O3", *flags, f"-DGPT_LONG_KERNELS=gpt_long_{name}",
                         str(here / "attention_cpu_kernels.cpp"), "-o", str(out / f"{name}.o")])
    operators = ["-O1", f"-I{include}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    commands.append([*base, *operators, *(["-DGPT_LONG_X86"] if x86 else []), str(here / "attention_cpu.cpp"),
                     "-o", str(out / "operators.o")])
    return commands


def _build(compiler: str, library: Path) -> None:
    """Compile into a folder beside `library`, then rename: two processes at once do no harm."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        out = Path(folder)
        running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
                   for command in _compile_commands(compiler, out)]
        errors = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            first = next((line for text in errors for line in text.splitlines() if "error" in line), "no message")
            raise ValueError(f"{compiler} failed: {first.strip()}")
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        link = [compiler, "-shared", *map(str, sorted(out.glob("*.o"))), *libraries, "-o",
                str(out / "attention_cpu.so")]
        subprocess.run(link, check=True, capture_output=True, text=True)
        os.replace(out / "attention_cpu.so", library)


def _library_path(compiler: str) -> Path:
    """Where the built extension lies: a name made of everything that it depends on."""
    here = Path(__file__).resolve().parent
    facts = [torch.__version__, compiler, platform.machine(), repr(_compile_commands("", Path()))]
    sources = [(here / name).read_bytes() for name in ("attention_cpu.h", "attention_cpu.cpp",
                                                       "attention_cpu_kernels.cpp")]
    digest = hashlib.sha256(b"\0".join([*sources, *map(str.encode, facts)])).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-long"
    return cache / f"attention_cpu-{digest}.so"


def _write_fake(start: Tensor, k: Tensor, v: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
                v_scales: Tensor | None, level: int = 2) -> None:
    pass


def _attend_fake(q: Tensor, start: Tensor, k_values: Tensor, k_scales: Tensor | None, v_values: Tensor,
                 v_scales: Tensor | None, level: int = 2) -> Tensor:
    B, Hq, T, D = q.shape
    return q.new_empty(B, T, Hq, D).transpose(1, 2)


@functools.cache
def load() -> str:
    """Build the extension if need be and load it, once a process.  "" if it can be used, else why not (one line)."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return "no C++ compiler found (install g++ or clang++, or set CXX), so attention takes the plain PyTorch path"
    try:
        library = _library_path(compiler)
        if not library.exists():
            _build(compiler, library)
        torch.ops.load_library(library)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        return f"the C++ attention could not be built ({reason}), so attention takes the plain PyTorch path"
    torch.library.register_fake("gpt_long_cpu::write", _write_fake)
    torch.library.register_fake("gpt_long_cpu::attend", _attend_fake)
    return ""


def available() -> bool:
    """Whether the C++ kernels can be used; builds them if need be."""
    return load() == ""


class CpuKVCache(KVCache):
    """KVCache with C++ write and attend.  Call load() before the first use.

    level: the best instruction set to use, an index into LEVELS; the processor's own best caps it.
    """
    level: int = 2

    def _serves(self, x: Tensor) -> bool:
        """Whether the kernels take this cache and an input x [B, H or Hq, T, D]."""
        B, _, T, D = x.shape
        stored = (torch.int8, torch.bfloat16, torch.float32)
        return (D % 16 == 0 and D <= MAX_HEAD_DIM and x.device.type == "cpu" and B == self.k_values.shape[0]
                and x.dtype in stored[1:] and self.k_values.dtype in stored and self.v_values.dtype in stored)

    def write(self, start: Tensor, k: Tensor, v: Tensor) -> None:
        if not self._serves(k):
            return super().write(start, k, v)
        torch.ops.gpt_long_cpu.write(start, k, v, self.k_values, self.k_scales, self.v_values, self.v_scales,
                                     self.level)

    def attend(self, q: Tensor, start: Tensor) -> Tensor:
        rows_whole = self.k_values.stride(3) == 1 and self.v_values.stride(3) == 1
        if not (rows_whole and q.shape[2] <= MAX_TOKENS and self.causal_mask == "none" and self._serves(q)):
            return super().attend(q, start)
        return torch.ops.gpt_long_cpu.attend(q, start, self.k_values, self.k_scales, self.v_values, self.v_scales,
                                             self.level)

"""What the CPU's fast paths share: C++ extensions, compiled once and kept under ~/.cache/gpt-long; memory.

    build_and_load(name, units, headers)    "" when the operators can be used, else the reason in one line
    HugePages().empty(shape, dtype)         a tensor in pages of 2 MB
    map_large_tensors(), separate_allocations(), trim_heap()     freed memory back to the system
    limit_instructions("avx2")              PyTorch and the kernels as on a narrower processor

A unit is one object file: a source and its flags.  So the same source can be compiled for several instruction
sets without one of them leaking into the others.  Needs torch only.
"""
import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")
X86_FLAGS = {"avx2": ("-mavx2", "-mfma", "-mf16c"),
             "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma",
                        "-mf16c")}
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt (malloc.h)
PAGE = 2 << 20  # bytes of a large page
INSTRUCTIONS = ("avx512", "avx2", "default")  # what ATEN_CPU_CAPABILITY may say; default: no vectors
X86 = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True)
class Unit:
    """One object file.  source: beside this file; flags: what it needs beyond FLAGS, optimization included;
    torch: whether it includes PyTorch's headers."""
    name: str
    source: str
    flags: tuple[str, ...] = ("-O3",)
    torch: bool = False


def find_compiler() -> str | None:
    """The C++ compiler: the environment's CXX, or the first of c++, g++, clang++ on the path."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _own_flags() -> list[str]:
    """Flags from the environment's CXXFLAGS, as build tools take them (tests/sanitize.sh uses it)."""
    return os.environ.get("CXXFLAGS", "").split()


def _command(compiler: str, unit: Unit, out: Path) -> list[str]:
    """The compiler call that makes `unit` in the folder `out`."""
    own = Path(torch.__file__).parent / "include"
    headers = [f"-I{own}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    source = Path(__file__).resolve().parent / unit.source
    return [compiler, *FLAGS, *unit.flags, *_own_flags(), *(headers if unit.torch else []), "-c", str(source),
            "-o", str(out / f"{unit.name}.o")]


def _build(compiler: str, units: Sequence[Unit], library: Path) -> None:
    """Compile into a folder beside `library`, then rename: two processes at once do no harm.

    ValueError with the compiler's first error when it fails.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        out = Path(folder)
        commands = [_command(compiler, unit, out) for unit in units]
        running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        errors = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            lines = "\n".join(errors).splitlines()
            first = next((line for line in lines if "error" in line), "no message")
            raise ValueError(f"{compiler}: {first.strip()}")
        objects = [str(out / f"{unit.name}.o") for unit in units]
        torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        link = [compiler, "-shared", *_own_flags(), *objects, *torch_libraries, "-o", str(out / library.name)]
        subprocess.run(link, check=True, capture_output=True, text=True)
        os.replace(out / library.name, library)


def _library_path(name: str, compiler: str, units: Sequence[Unit], headers: Sequence[str]) -> Path:
    """Where the built extension lies: a name made of everything that it depends on."""
    here = Path(__file__).resolve().parent
    sources = [(here / file).read_bytes() for file in (*dict.fromkeys(u.source for u in units), *headers)]
    facts = [torch.__version__, compiler, platform.machine(), repr(FLAGS), repr(units), repr(_own_flags())]
    digest = hashlib.sha256(b"\0".join([*sources, *map(str.encode, facts)])).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-long"
    return cache / f"{name}-{digest}.so"


def build_and_load(name: str, units: Sequence[Unit], headers: Sequence[str] = ()) -> str:
    """Build the extension `name` if need be and load its operators; one call a process is enough.

    headers: files that the units include and whose change asks for a new build.
    Returns "" when the operators can be used, else why not, in one line that says what to do.
    """
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler found; install g++ or clang++, or set CXX"
    try:
        library = _library_path(name, compiler, units, headers)
        if not library.exists():
            _build(compiler, units, library)
        torch.ops.load_library(library)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        return f"{name} could not be built: " + " ".join(str(getattr(error, "stderr", None) or error).split())
    return ""


def limit_instructions(most: str) -> None:
    """Let PyTorch, oneDNN and this project's kernels take at most one of INSTRUCTIONS, and processes started
    from here, too.  ValueError when PyTorch has chosen already: call it before any operator runs."""
    os.environ["ATEN_CPU_CAPABILITY"] = most
    os.environ["ONEDNN_MAX_CPU_ISA"] = {"avx512": "ALL", "avx2": "AVX2"}.get(most, "SSE41")
    found = torch.backends.cpu.get_cpu_capability().lower()
    allowed = INSTRUCTIONS[INSTRUCTIONS.index(most):]
    if found not in allowed:
        raise ValueError(f"PyTorch has chosen {found} already; {most} comes too late")


def map_large_tensors() -> None:
    """From now on memory for each tensor over 1 MB comes from the system and goes back there once freed; the
    C library (glibc) would keep holes in its heap.  Costs page faults."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)


@contextlib.contextmanager
def separate_allocations() -> Iterator[None]:
    """map_large_tensors for what is made inside, which is for loading.  Afterwards the C library's two limits
    are where it would have moved them by itself."""
    map_large_tensors()
    try:
        yield
    finally:
        trim_heap()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 32 << 20)
            ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, 64 << 20)


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library (glibc) would keep up to 64 MB at the heap's
    end and every hole inside."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HugePages:
    """Memory for tensors that are read over and over, in 2 MB pages where Linux has them: reading is a
    quarter faster than in 4 kB ones.  Handed out in order; freed when every tensor of a block is gone."""
    block = 1 << 28  # bytes asked for at a time; what is not used is never touched and takes no memory

    def __init__(self) -> None:
        self._memory, self._at = b"", 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """As torch.empty, which itself serves other devices; on the CPU aligned to 64 bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        elsewhere = torch.device(device).type != "cpu" or nbytes == 0
        if elsewhere or is_in_torch_dispatch_mode():  # the latter: fake or counted (memory_tracker.py)
            return torch.empty(shape, dtype=dtype, device=device)
        if self._at + nbytes > len(self._memory):
            self._memory, self._at = _new_block(max(nbytes, self.block))
        at, self._at = self._at, self._at + -(-nbytes // 64) * 64
        # A storage of its own: a compiler that saw two views of one would take them for aliases.
        return torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=at).view(shape)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """As `empty`, zeros: the memory is taken now, not when it is written to."""
        return self.empty(shape, dtype, device).zero_()


def _new_block(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory fresh from the system, and where in it `nbytes` begin, at a multiple of 2 MB."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, nbytes + PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: ordinary pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE

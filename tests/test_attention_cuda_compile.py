"""The Triton kernels compiled for GPUs that are not there: registers, shared memory, a lookup in PTX."""
import operator
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from attention_cuda import _lookup, decode_config
from attention_cuda_kernels import _combine_kernel, _split_kernel, _write_kernel, triton
from kv_cache import LEVELS, CacheSpec, KVCache

on_compiler = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1" or triton is None,
                                 reason="needs triton, outside its interpreter")


def compiled(kernel, constants: dict, pointers: dict, arch: int):
    """`kernel` for compute capability arch / 10, for a cache of the common layout: strides in 16s."""
    options = {name: constants[name] for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    is_even = {"k_": constants.get("K_ALIGN") != 4, "v_": constants.get("V_ALIGN") != 4}  # 4-bit rows are not
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants
               and ("stride" in name and is_even.get(name[:2], True) or signature[name].startswith("*"))}
    source = triton.compiler.ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, **options})


def resources(kernel, tmp_path: Path) -> dict[str, int]:
    """Registers and stack bytes per thread, shared memory per program, as the assembler reports them."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton wheel has no cuobjdump")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    report = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True).stdout
    usage = {name: int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK")}
    return {"registers": usage["REG"], "stack": usage["STACK"], "shared": kernel.metadata.shared}


SPLIT_POINTERS = {"start_ptr": "*i64", "part_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32",
                  "k_scale_ptr": "*bf16", "v_scale_ptr": "*bf16", "q_ptr": "*bf16"}
KINDS = {16: "*bf16", 8: "*i8", 4: "*u8"}


@on_compiler
@pytest.mark.parametrize(("n_rows", "D", "bits", "archs", "most_registers", "most_shared"), [
    (4, 128, (8, 8), (80, 89, 90), 128, 48 << 10),  # Llama-3.1-8B: 4 programs to a multiprocessor of 65536
    (4, 128, (4, 4), (80, 89, 90), 128, 32 << 10),
    (3, 64, (8, 4), (80, 90), 128, 32 << 10),  # SmolLM2
    (4, 128, (16, 16), (90,), 128, 48 << 10),
    (64, 128, (8, 8), (89,), 255, 72 << 10),
    (64, 128, (4, 4), (89,), 255, 48 << 10),
])
def test_decode_compiles_without_a_device(n_rows, D, bits, archs, most_registers, most_shared, tmp_path):
    """Shared memory of a program is at most 99 KB on sm_89; a stack means spilled registers."""
    cache = KVCache(CacheSpec(*bits), 1, 8, 16, D)
    constants = decode_config(n_rows, D, cache.k_values, cache.v_values, torch.bfloat16)
    constants |= {"G": n_rows, "T": 1, "ks_stride_s": 1, "vs_stride_s": 1}
    pointers = SPLIT_POINTERS | {"k_ptr": KINDS[bits[0]], "v_ptr": KINDS[bits[1]]}
    for arch in archs:
        kernel = compiled(_split_kernel, constants, pointers, arch)
        assert f".target sm_{arch}" in kernel.asm["ptx"] and "mma" in kernel.asm["ptx"]
        assert "ld.global.b8" not in kernel.asm["ptx"]  # the cache comes in wide and asynchronous loads
        used = resources(kernel, tmp_path)
        print(f"sm_{arch} decode, {n_rows} rows of {D}, bits {bits}: {used}")
        assert used["stack"] <= 32 * (4 in bits) and used["registers"] <= most_registers
        assert used["shared"] <= most_shared


@on_compiler
def test_small_kernels_compile_without_a_device(tmp_path):
    arch = 80
    shape = {"T": 1, "G": 4, "D": 128, "BLOCK_N": 64, "BLOCK_D": 128, "BLOCK_SPLITS": 16}
    pointers = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "start_ptr": "*i64", "out_ptr": "*bf16"}
    used = {"combine": resources(compiled(_combine_kernel, shape, pointers, arch), tmp_path)}
    for bits, new, is_shared in ((8, "*bf16", True), (4, "*fp32", False)):
        strong, block_t = (8, 1) if bits == 4 else (0, 4)
        shape = {"D": 128, "BLOCK_T": block_t, "BLOCK_H": 8, "BLOCK_D": 128, "K_BITS": bits, "V_BITS": bits,
                 "K_STRONG": strong, "V_STRONG": strong, "IS_SHARED": is_shared,
                 "ks_stride_s": 1, "vs_stride_s": 1}
        pointers = {"k_ptr": new, "v_ptr": new, "k_cache_ptr": KINDS[bits], "v_cache_ptr": KINDS[bits],
                    "k_scale_ptr": "*bf16", "v_scale_ptr": "*bf16", "start_ptr": "*i64"}
        kernel = compiled(_write_kernel, shape, pointers, arch)
        assert "div.rn.f32" in kernel.asm["ptx"] and "div.full" not in kernel.asm["ptx"]  # IEEE divisions
        used[f"write of {bits} bits"] = resources(kernel, tmp_path)
    print(f"sm_{arch}: {used}")
    for numbers in used.values():
        assert numbers["stack"] == 0 and numbers["registers"] <= 128 and numbers["shared"] <= 16 << 10


def run_ptx(assembly: str, given: int) -> list[int]:
    """Registers $0 .. $3 after straight-line PTX of 32-bit integers whose input is $4 = `given`."""
    def prmt(a: int, b: int, selector: int) -> int:
        source, out = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)], 0
        for i in range(4):
            pick = selector >> 4 * i & 15
            byte = source[pick & 7]
            out |= (byte >> 7) * 0xFF << 8 * i if pick & 8 else byte << 8 * i
        return out

    does = {"not": operator.invert, "and": operator.and_, "xor": operator.xor, "sub": operator.sub,
            "add": operator.add, "shr": operator.rshift, "shl": operator.lshift, "prmt": prmt}
    registers = {"$4": given}
    for name, target, rest in re.findall(r"^\s+(\w+)\.[bu]32 ([$\w]+), (.*);$", assembly, re.MULTILINE):
        operands = [registers[x] if x in registers else int(x, 0) for x in rest.split(", ")]
        registers[target] = does[name](*operands) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(4)]


def test_lookup_in_ptx_gives_every_level_everywhere():
    for dtype in (torch.bfloat16, torch.float16):
        assembly = _lookup(4, dtype)
        for code in range(256):
            for at in range(4):
                four = [0x5A] * at + [code] + [0xA5] * (3 - at)
                registers = run_ptx(assembly, int.from_bytes(four, "little"))
                out = torch.tensor([r - (r >> 31 << 32) for r in registers], dtype=torch.int32).view(dtype)
                assert out.tolist() == [LEVELS[b & 15] for b in four] + [LEVELS[b >> 4] for b in four]

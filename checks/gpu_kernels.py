"""Compiles our Triton kernels for three generations of GPUs and prints what they use; needs neither GPU nor driver.

Exits with 1 if a kernel uses more than its bounds, or has a fused product and sum outside of tensor cores, which
would round differently from one kernel to the next.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.engine.gpu_kernels import attention, cache, edits, filters, layers, race
from outrider.engine.gpu_kernels.work_list import Tile

CAPABILITIES = (80, 90, 100)
TILE = Tile()


@dataclass(frozen=True)
class Case:
    """A kernel with the constants of one use."""

    name: str
    kernel: Any
    types: Mapping[str, str]  # of arguments that are no constants
    constants: Mapping[str, Any]
    most_shared: int  # bytes; 48 KiB fit three programs on each multiprocessor of an A100
    most_spilled: int  # bytes stored by a thread
    most_registers: int = 255  # of a thread, which can have no more: then `most_spilled` is the bound
    num_warps: int = 4
    num_stages: int = 2
    multiples_of_16: tuple[str, ...] = ()  # numbers of which the launch would see that


@dataclass(frozen=True)
class Use:
    """What one compiled kernel takes."""

    registers: int  # of a thread
    shared: int  # bytes
    spilled: int  # bytes
    fused: int  # instructions
    products: int  # instructions for tensor cores


def cases() -> Iterator[Case]:
    """Every kernel, with the sizes of an 8B model of the Llama family."""
    types = dict.fromkeys(("query", "key_cache", "value_cache", "output"), "*bf16")
    types |= dict.fromkeys(("split_values", "split_largest", "split_totals"), "*fp32")
    types |= dict.fromkeys(("block_tables", "plan"), "*i32")
    types |= dict.fromkeys(("positions", "path_starts", "path_slots"), "*i64")
    types |= dict.fromkeys(("first_merged", "window"), "i32")
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    sizes = {"HEADS_PER_KV": 4, "HEADS_PER_TILE": 4, "NUM_KV_HEADS": 8, "HEAD": 128, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
    sizes |= {"LINES": TILE.lines, "KEYS": TILE.keys, "SPLIT_KEYS": TILE.split_keys}
    sizes |= {"SPLITS_PER_SIZE": TILE.splits_per_size}
    for has_paths in (False, True):
        flags = {"HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_PATHS": has_paths}
        yield Case(
            f"attend{', trees' * has_paths}",
            attention.attend,
            types,
            sizes | flags,
            most_shared=48 << 10,
            most_spilled=256 if has_paths else 0,
            num_warps=TILE.num_warps,
            num_stages=TILE.num_stages,
        )
    flags = {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_PATHS": False}
    large = sizes | {"HEADS_PER_KV": 2, "HEADS_PER_TILE": 2, "HEAD": 256, "HEAD_DIM": 256, "KEYS": 32}
    yield Case("attend, heads of 256", attention.attend, types, large | flags, most_shared=64 << 10, most_spilled=128)
    merged = {"NUM_HEADS": 32, "HEAD": 128, "HEAD_DIM": 128, "SPLIT_KEYS": TILE.split_keys, "HAS_WINDOW": False}
    merged |= {"SPLITS_PER_SIZE": TILE.splits_per_size}
    yield Case(
        "merge_splits",
        attention.merge_splits,
        types,
        merged,
        most_shared=1 << 10,
        most_spilled=0,
        most_registers=96,
        num_warps=1,
    )

    types = {"values": "*fp32", "table": "*i64", "limits": "*i64", "best": "*i64", "token_ids": "*i64"}
    types |= dict.fromkeys(("row_stride", "num_ids", "num_rows", "num_chunks"), "i32")
    for has_limits in (False, True):
        sizes = {"BLOCKS": race.BLOCKS_PER_PROGRAM, "HAS_LIMITS": has_limits}
        name = f"best_scores{', limits' * has_limits}"
        yield Case(name, race.best_scores, types, sizes, most_shared=16 << 10, most_spilled=0, most_registers=96)
    yield Case("pick", race.pick, types, {"CHUNKS": 256}, most_shared=1 << 10, most_spilled=0, most_registers=32)
    sizes = {"CHUNK": filters.CHUNK, "HAS_TOP_K": True, "HAS_TOP_P": True}
    yield Case(
        "filter_limits",
        filters.filter_limits,
        types,
        sizes,
        most_shared=16 << 10,
        most_spilled=0,
        most_registers=184,
        num_warps=filters.NUM_WARPS,
    )
    yield _storing()
    types = {"logits": "*fp32", "packed": "*i64", "num_changed": "i32", "num_entries": "i32"}
    yield Case(
        "edit_rows",
        edits.edit_rows,
        types,
        {"ENTRIES": edits.ENTRIES},
        most_shared=1 << 10,
        most_spilled=0,
        most_registers=48,
    )
    types = dict.fromkeys(("rows", "weight", "bias", "output"), "*bf16") | {"parts": "*fp32"}
    types |= dict.fromkeys(("num_rows", "num_outputs", "num_features", "num_splits"), "i32")
    tile = layers.PRODUCT_TILE
    sizes = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "FEATURES": tile.features}
    sizes |= {"SPLIT_FEATURES": tile.split_features, "HAS_BIAS": True}
    for is_split in (False, True):
        yield Case(
            f"multiply{', split' * is_split}",
            layers.multiply,
            types,
            sizes | {"IS_SPLIT": is_split},
            most_shared=48 << 10,
            most_spilled=0,
            most_registers=96,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            multiples_of_16=("num_features", "num_outputs"),
        )
    sizes = {"BLOCK": 256, "HAS_BIAS": True}
    yield Case(
        "merge_products", layers.merge_products, types, sizes, most_shared=1 << 10, most_spilled=0, most_registers=40
    )
    types = {"rows": "*bf16", "weight": "*fp32", "output": "*bf16", "width": "i32", "epsilon": "fp32"}
    yield Case(
        "normalise", layers.normalise, types, {"WIDTH": 4096}, most_shared=4 << 10, most_spilled=0, most_registers=144
    )


def _storing() -> Case:
    types = dict.fromkeys(("keys", "values", "key_cache", "value_cache"), "*bf16") | {"slots": "*i64"}
    strides = tuple(f"{tensor}_{of}_stride" for tensor in ("key", "value") for of in ("row", "head"))
    return Case(
        "store_rows",
        cache.store_rows,
        types | dict.fromkeys(strides, "i32"),
        {"NUM_HEADS": 8, "HEAD": 128, "WIDTH": 1024},
        most_shared=0,
        most_spilled=0,
        most_registers=40,
        multiples_of_16=strides,
    )


def compile_case(case: Case, capability: int) -> Use:
    """Compiles to PTX, and that with ptxas to machine code."""
    names = case.kernel.arg_names
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    types = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or name in case.multiples_of_16
    }
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": False}
    compiled = triton.compile(
        ASTSource(fn=case.kernel, signature=types, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    ptx = compiled.asm["ptx"]
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if capability >= 100:
        assembler = assembler.with_name("ptxas-blackwell")
    target = re.search(r"^\.target ([a-z0-9_]+)", ptx, re.MULTILINE)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory(prefix="outrider-ptx-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="ascii")
        command = [str(assembler), "-v", "--fmad=false", f"--gpu-name={target[1]}", str(source), "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Use(
        registers=max(map(int, re.findall(r"Used (\d+) registers", report))),
        shared=compiled.metadata.shared,
        spilled=max(map(int, re.findall(r"(\d+) bytes spill stores", report))),
        fused=len(re.findall(r"\bfma\.", ptx)),
        products=len(re.findall(r"\b(?:mma|wgmma|tcgen05\.mma)\.\S*sync", ptx)),
    )


def main() -> int:
    print(f"triton {triton.__version__}: capability, registers of a thread, shared and spilled bytes, mma instructions")
    has_failed = False
    for case in cases():
        for capability in CAPABILITIES:
            use = compile_case(case, capability)
            problems = [
                *[f"more than {case.most_registers} registers"] * (use.registers > case.most_registers),
                *[f"more than {case.most_shared} shared bytes"] * (use.shared > case.most_shared),
                *[f"more than {case.most_spilled} spilled bytes"] * (use.spilled > case.most_spilled),
                *[f"{use.fused} fused instructions"] * (use.fused > 0),
            ]
            has_failed |= bool(problems)
            print(
                f"{case.name:24s} sm_{capability:<4d}{use.registers:5d}{use.shared:8d}{use.spilled:6d}{use.products:6d}"
                f"  {'; '.join(problems) or 'ok'}",
                flush=True,
            )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

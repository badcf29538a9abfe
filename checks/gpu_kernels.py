"""Compiles the Triton kernels for three generations of GPUs and prints their resources; needs neither GPU nor driver.

Exits with 1 if a kernel has a fused multiply-add outside of tensor cores, which would round differently from one kernel
to the next, or exceeds its bounds. The bounds are for the compiler of the pinned Triton. With another version, this
check prints which kernels exceed them, without failing.
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

from outrider.engine.gpu_kernels import attention, decoder, edits, experts, filters, layers, race
from outrider.engine.gpu_kernels.work_list import Tile

CAPABILITIES = (80, 90, 100)
TILE = Tile()


@dataclass(frozen=True)
class Case:
    """A kernel with the constants of one use."""

    name: str
    kernel: Any
    types: Mapping[str, str]  # types of the arguments that are not constants
    constants: Mapping[str, Any]
    max_shared: int  # bytes of shared memory; at 48 KiB, three programs fit on each multiprocessor of an A100
    max_spilled: int  # bytes of spilled registers that a thread stores
    max_registers: int = 255  # per thread; 255 is the hardware's limit, so then `max_spilled` is the bound
    num_warps: int = 4
    num_stages: int = 2
    multiples_of_16: tuple[str, ...] = ()  # integer arguments that a launch specialises as multiples of 16


@dataclass(frozen=True)
class Use:
    """The resources of one compiled kernel."""

    registers: int  # per thread
    shared: int  # bytes of shared memory
    spilled: int  # bytes that a thread stores
    fused: int  # fused multiply-add instructions outside of tensor cores
    products: int  # instructions for tensor cores


def cases() -> Iterator[Case]:
    """Yields every kernel, with the sizes of an 8B model of the Llama family."""
    types = dict.fromkeys(("query", "key_cache", "value_cache", "output"), "*bf16")
    types |= dict.fromkeys(("split_values", "split_largest", "split_totals", "sinks"), "*fp32")
    types |= dict.fromkeys(("block_tables", "plan"), "*i32")
    types |= dict.fromkeys(("positions", "path_starts", "path_slots"), "*i64")
    types |= {"window": "i32"}
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    sizes = {"HEADS_PER_KV": 4, "HEADS_PER_TILE": 4, "NUM_KV_HEADS": 8, "HEAD": 128, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
    sizes |= {"LINES": TILE.lines, "KEYS": TILE.keys, "SPLIT_KEYS": TILE.split_keys}
    sizes |= {"SPLITS_PER_SIZE": TILE.splits_per_size, "GROUP": 0}
    for has_paths in (False, True):
        flags = {"HAS_WINDOW": False, "HAS_SINKS": False, "HAS_SOFTCAP": False, "HAS_PATHS": has_paths}
        yield Case(
            f"attend{', trees' * has_paths}",
            attention.attend,
            types,
            sizes | flags,
            max_shared=48 << 10,
            max_spilled=256 if has_paths else 8,  # only on 8.0
            num_warps=TILE.num_warps,
            num_stages=TILE.num_stages,
        )
    flags = {"HAS_WINDOW": True, "HAS_SINKS": True, "HAS_SOFTCAP": True, "HAS_PATHS": False}
    large = sizes | {"HEADS_PER_KV": 2, "HEADS_PER_TILE": 2, "HEAD": 256, "HEAD_DIM": 256, "KEYS": 32}
    yield Case("attend, heads of 256", attention.attend, types, large | flags, max_shared=64 << 10, max_spilled=128)
    merged = {"NUM_HEADS": 32, "HEAD": 128, "HEAD_DIM": 128, "SPLIT_KEYS": TILE.split_keys, "HAS_WINDOW": False}
    merged |= {"SPLITS_PER_SIZE": TILE.splits_per_size, "HAS_SINKS": True}
    yield Case(
        "merge_splits",
        attention.merge_splits,
        types,
        merged,
        max_shared=1 << 10,
        max_spilled=0,
        max_registers=96,
        num_warps=1,
    )

    types = {"values": "*fp32", "table": "*i64", "limits": "*i64", "best": "*i64", "token_ids": "*i64"}
    types |= dict.fromkeys(("row_stride", "num_ids", "num_rows", "num_chunks"), "i32")
    for has_limits in (False, True):
        sizes = {"BLOCKS": race.BLOCKS_PER_PROGRAM, "HAS_LIMITS": has_limits}
        name = f"best_scores{', limits' * has_limits}"
        yield Case(
            name,
            race.best_scores,
            types,
            sizes,
            max_shared=16 << 10,
            max_spilled=0,
            max_registers=96,
            multiples_of_16=("row_stride", "num_ids"),
        )
    yield Case("pick", race.pick, types, {"CHUNKS": 256}, max_shared=1 << 10, max_spilled=0, max_registers=32)
    yield from _filters()
    types = {"logits": "*fp32", "packed": "*i64", "num_changed": "i32", "num_entries": "i32"}
    yield Case(
        "edit_rows",
        edits.edit_rows,
        types,
        {"ENTRIES": edits.ENTRIES},
        max_shared=1 << 10,
        max_spilled=0,
        max_registers=48,
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
            max_shared=48 << 10,
            max_spilled=0,
            max_registers=96,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            multiples_of_16=("num_features", "num_outputs"),
        )
    sizes = {"BLOCK": 256, "HAS_BIAS": True}
    yield Case(
        "merge_products", layers.merge_products, types, sizes, max_shared=1 << 10, max_spilled=0, max_registers=40
    )
    yield from _decoder_kernels()
    yield from _experts()


def _experts() -> Iterator[Case]:
    """Yields the kernels of experts, with the sizes of Qwen 3 30B A3B, and of the layout of gpt-oss."""
    tile = layers.PRODUCT_TILE
    types = dict.fromkeys(("rows", "weight", "bias", "output"), "*bf16") | {"products": "*fp32", "weights": "*fp32"}
    types |= dict.fromkeys(("order", "starts", "tile_starts", "expert_ids"), "*i64")
    counts = ("num_outputs", "num_features", "expert_stride", "output_stride", "feature_stride")
    types |= dict.fromkeys(counts, "i32")
    sizes = {"NUM_EXPERTS": 128, "PADDED_EXPERTS": 128, "DIVISOR": 8}
    sizes |= {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "FEATURES": tile.features}
    for is_transposed in (False, True):
        one = "output_stride" if is_transposed else "feature_stride"
        yield Case(
            f"multiply_by_experts{', transposed' * is_transposed}",
            experts.multiply_by_experts,
            types,
            sizes | {"HAS_BIAS": is_transposed, one: 1},
            max_shared=48 << 10,
            max_spilled=0,
            max_registers=128,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            multiples_of_16=tuple({*counts} - {one}),
        )
    sizes = {"NUM_EXPERTS": 128, "NUM_SLOTS": 8, "BLOCK": experts.SLOTS_BLOCK}
    yield Case("add_slots", experts.add_slots, types, sizes, max_shared=1 << 10, max_spilled=0, max_registers=40)


def _decoder_kernels() -> Iterator[Case]:
    """Yields the kernels that run between products and attention. Norms have as many weights as a layer of Gemma 3."""
    types = dict.fromkeys(("residual", "added", "total", "output", "weight", "added_weight"), "*bf16")
    for width in (4096, 8192):
        for has_added_norm in (False, True):
            flags = {"HAS_ADDED": True, "HAS_ADDED_NORM": has_added_norm, "ROUNDS": not has_added_norm}
            yield Case(
                f"normalise, {width}{', twice' * has_added_norm}",
                decoder.normalise,
                types | {"epsilon": "fp32"},
                {"WIDTH": width, "PADDED": width} | flags,
                max_shared=1 << 10,
                max_spilled=0,
                max_registers=72,
                num_warps=decoder.norm_warps(width),
            )
    types = dict.fromkeys(("projected", "query", "key_cache", "value_cache"), "*bf16")
    types |= dict.fromkeys(("query_weight", "key_weight", "cosines", "sines"), "*bf16")
    types |= {"positions": "*i64", "slots": "*i64", "epsilon": "fp32"}
    for head_dim, padded, has_norms in ((128, 64, False), (128, 64, True), (80, 64, False), (256, 128, True)):
        sizes = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": head_dim // 2, "PADDED": padded}
        sizes |= {"HEADS": decoder.HEADS_PER_PROGRAM, "HAS_NORMS": has_norms, "ROUNDS": True}
        yield Case(
            f"rotate, heads of {head_dim}{', norms' * has_norms}",
            decoder.rotate,
            types,
            sizes,
            max_shared=1 << 10,
            max_spilled=0,
            max_registers=40,
            num_warps=decoder.rotation_warps(padded),
        )
    for is_gelu in (False, True):
        yield Case(
            f"multiply_gates, {'gelu' if is_gelu else 'silu'}",
            decoder.multiply_gates,
            {"gate_up": "*bf16", "output": "*bf16"},
            {"WIDTH": 14336, "BLOCK": decoder.ACTIVATION_BLOCK, "IS_GELU": is_gelu},
            max_shared=0,
            max_spilled=0,
            max_registers=40,
        )


def _filters() -> Iterator[Case]:
    types = {"values": "*fp32", "num_rows": "i32"} | dict.fromkeys(("row_stride", "num_ids"), "i32")
    types |= dict.fromkeys(("table", "scratch", "listed", "limits"), "*i64")
    sizes = {"LANES": filters.LANES, "SLICES": filters.SLICES, "ROOM": filters.MAX_LISTED, "CHUNK": filters.CHUNK}
    sizes |= {"BINS": filters.BINS, "ID_BITS": 17}
    kernels = {
        filters.raise_lanes: 48,
        filters.list_tokens: 96,
        filters.fill_bins: 72,
        filters.list_bins: 80,
        filters.filter_limits: 192,
    }
    for kernel, max_registers in kernels.items():
        yield Case(
            kernel.__name__,
            kernel,
            types,
            {name: value for name, value in sizes.items() if name in kernel.arg_names},
            max_shared=16 << 10,
            max_spilled=0,
            max_registers=max_registers,
            num_warps=filters.NUM_WARPS,
            multiples_of_16=("row_stride", "num_ids"),
        )


def compile_case(case: Case, capability: int) -> Use:
    """Compiles a kernel to PTX, and then with ptxas to machine code."""
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
        # Excludes bfloat16: capability 8.0 computes its sums and products as fused ones, with a factor 1 or a term -0.
        fused=len(re.findall(r"\bfma\.(?!rn\.bf16)", ptx)),
        products=len(re.findall(r"\b(?:mma|wgmma|tcgen05\.mma)\.\S*sync", ptx)),
    )


def pinned_version() -> str:
    """Returns the version of Triton in constraints.txt."""
    constraints = (Path(__file__).resolve().parent.parent / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(r"^triton==(\S+)$", constraints, re.MULTILINE)
    assert found is not None, "constraints.txt pins triton"
    return found[1]


def main() -> int:
    pinned = pinned_version()
    has_bounds = triton.__version__ == pinned
    if not has_bounds:
        print(f"bounds are for triton {pinned}: what exceeds them here is no failure")
    print(f"triton {triton.__version__}: capability, registers of a thread, shared and spilled bytes, mma instructions")
    has_failed = False
    for case in cases():
        for capability in CAPABILITIES:
            use = compile_case(case, capability)
            excess = [
                *[f"more than {case.max_registers} registers"] * (use.registers > case.max_registers),
                *[f"more than {case.max_shared} shared bytes"] * (use.shared > case.max_shared),
                *[f"more than {case.max_spilled} spilled bytes"] * (use.spilled > case.max_spilled),
            ]
            problems = [*excess, *[f"{use.fused} fused instructions"] * (use.fused > 0)]
            has_failed |= use.fused > 0 or (has_bounds and bool(excess))
            print(
                f"{case.name:24s} sm_{capability:<4d}{use.registers:5d}{use.shared:8d}{use.spilled:6d}{use.products:6d}"
                f"  {'; '.join(problems) or 'ok'}",
                flush=True,
            )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

"""The tables of docs/models.md: `make models` compares every family and writes them, the tests check them."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import mdformat
import torch

from tests.families.compared import NUM_TOKENS, Compared
from tests.families.families import FAMILIES, Family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- made by `make models` -->\n", "<!-- end -->\n"
STYLE = {"wrap": 120, "number": True, "plugin": {"tables": {"compact_tables": True}}}
"""mdformat's options, the same as in .mdformat.toml."""
FAMILY, REFUSAL = "family", "message"
NOTHING = "–"
REFUSED = [name for name, family in FAMILIES.items() if family.refusal]
QUANTISED = [name for name, family in FAMILIES.items() if family.is_quantised or family.rounds]
SERVED = [name for name in FAMILIES if name not in {*REFUSED, *QUANTISED}]
_HEADROOM = 1.5
"""How far beyond a measured difference its bound is at least, for other processors and instruction paths."""
_SMALLEST_BOUND = 1e-5
_SPARE_TOKENS = 3
"""By how many tokens a bound on their number is at least below what was measured."""

Result = str | int | float
"""A fact, which is the same on every machine, a number of tokens of NUM_TOKENS, or a relative difference."""
COLUMNS: Mapping[str, Callable[[Compared], Result]] = {
    "kernels": lambda model: (
        model.kernels + f", {model.family.torch_computes} by torch" * bool(model.family.torch_computes)
    ),
    "numerics": lambda model: model.numerics,
    "float32": lambda model: NOTHING if model.family.rounds else model.difference(model.our_logits("float32")),
    "bfloat16": lambda model: model.difference(model.our_logits("bfloat16")),
    "transformers' bfloat16": lambda model: model.difference(model.own_logits("bfloat16")),
    "greedy": Compared.greedy,
    "drafts": Compared.drafts,
    "hand-off": Compared.hand_off,
    "prefix hit": Compared.prefix_hit,
    "failover": Compared.failover,
    "KV bytes a token": lambda model: str(model.kv_bytes),
}
"""The comparisons by their column."""


def cell(result: Result) -> str:
    """Returns the text of a result: a fact, or a bound on what was measured, 1, 2 or 5 × 10^n for a difference."""
    if isinstance(result, str):
        return result
    if isinstance(result, int):
        return f"≥ {max(result - _SPARE_TOKENS, 0) // 4 * 4} of {NUM_TOKENS}"
    wanted = max(_HEADROOM * result, _SMALLEST_BOUND)
    power = 10.0 ** math.floor(math.log10(wanted))
    bound = next(bound for digit in (1, 2, 5, 10) if (bound := digit * power) >= wanted * (1 - 1e-9))
    return f"≤ {100 * bound:g} %" if bound >= 1e-3 else f"≤ {bound:.0e}".replace("e-0", "e-")


def fits(result: Result, told: str) -> bool:
    """Returns whether a cell of the page is right: it has the same fact, or a bound on what was measured."""
    if isinstance(result, str):
        return result == told
    if isinstance(result, int):
        return result >= int(told.split()[1])
    number, _, unit = told.removeprefix("≤ ").partition(" ")
    return result <= float(number) / (100 if unit else 1)


def read_page() -> dict[str, dict[str, str]]:
    """Returns the cells of all tables of the page: by family, then by column."""
    tables: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif set(line) - set("|- :"):
            tables[cells[0]] = dict(zip(head[1:], cells[1:], strict=True))
    return tables


def render(cells: Mapping[str, Sequence[str]]) -> str:
    """Returns the tables from the cells of each row."""
    lines: list[str] = []
    for heading, head, names in (
        ("Served", COLUMNS, SERVED),
        ("Quantised", COLUMNS, QUANTISED),
        ("Refused", [REFUSAL], REFUSED),
    ):
        lines += [f"\n## {heading}\n", *_table([FAMILY, *head], ([name, *cells[name]] for name in names))]
    return mdformat.text("\n".join(lines), options=STYLE, extensions={"gfm"})


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["--"] * len(head), *rows)]


def measure(name: str, family: Family) -> list[str]:
    """Returns the cells of a row."""
    if family.refusal:
        return [f"… {family.refusal}"]
    if family.is_missing:
        return list(read_page()[name].values())
    with tempfile.TemporaryDirectory(prefix="outrider-models-") as directory:
        model = Compared(family, Path(directory))
        cells = [cell(column(model)) for column in COLUMNS.values()]
    print(name, *cells, sep=" | ", flush=True)
    return cells


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    cells = {name: measure(name, family) for name, family in FAMILIES.items()}
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{render(cells)}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`outrider replay`: recomputes the answer of a receipt and compares it (docs/replay.md)."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from outrider.cli.config import sections_of
from outrider.cli.connection import add_connection_arguments, add_target_argument, read_connection
from outrider.cli.printable import printable
from outrider.client import Client
from outrider.client.replay import Comparison, check_model, describe_gap, replay, replay_obstacle
from outrider.config.arguments import add_settings_arguments, load_arguments
from outrider.config.values import without_passwords
from outrider.errors import ConfigError, InvalidRequestError, MismatchError, NotFoundError, OutriderError
from outrider.node_stamp import NodeVersion
from outrider.receipt import ABORTED, FAILED, Receipt, find_receipt, read_receipts

STORE_SECONDS = 10.0
"""Seconds that the store may take to find a receipt."""
IDENTICAL, DIFFERENT, NOT_REPLAYABLE = 0, 1, 3
"""Exit statuses. Every error also has status 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "receipt", metavar="ID|FILE", help="a request id, or a file with receipts, each of which is replayed"
    )
    add_target_argument(parser, flag="--against")
    parser.add_argument(
        "--receipts",
        metavar="DIR|valkey://URL",
        help="directory or store that has the receipt of an ID; default: router.receipts",
    )
    add_settings_arguments(parser)
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status. If there are several receipts, DIFFERENT takes precedence over NOT_REPLAYABLE."""
    path = Path(arguments.receipt)
    receipts: Iterable[Receipt] = read_receipts(path) if path.is_file() else [_find(arguments)]
    results: Counter[int] = Counter()
    with Client(arguments.target, **read_connection(arguments)) as client:
        for receipt in receipts:
            try:
                results[_replay(client, receipt)] += 1
            except (MismatchError, InvalidRequestError) as error:  # the next receipt may still work
                _say(f"{receipt.request_id}: error: {error}")
                results[DIFFERENT] += 1
            sys.stdout.flush()
    if not results:
        raise NotFoundError(f"{path} has no receipt")
    if path.is_file():
        _say(
            f"replay: receipts={results.total()} identical={results[IDENTICAL]} different={results[DIFFERENT]} "
            f"not_replayable={results[NOT_REPLAYABLE]}"
        )
    return next(status for status in (DIFFERENT, NOT_REPLAYABLE, IDENTICAL) if results[status])


def _replay(client: Client, receipt: Receipt) -> int:
    """Returns the exit status. Raises: OutriderErrors."""
    name = receipt.request_id
    if reason := replay_obstacle(receipt):
        _say(f"{name}: cannot be replayed: {reason}")
        return NOT_REPLAYABLE
    check_model(receipt, client.model())
    if inexact := sorted({node.numerics for node in receipt.nodes if not node.numerics.startswith("exact (")}):
        expected = f"a difference is to be expected, as the numerics were {' and '.join(inexact)}"
        _say(f"outrider replay: {name}: {expected}", sys.stderr)
    compared, nodes = replay(client, receipt)
    differences = [sample for sample in compared if sample.is_different]
    samples = "1 sample" if len(compared) == 1 else f"{len(compared)} samples"
    counts = f"{sum(sample.num_alike for sample in compared)} tokens, {samples}"
    cut = {ABORTED: " of an answer that was aborted", FAILED: f" of an answer that failed ({receipt.error})"}
    if not differences:
        _say(f"{name}: identical: {counts}{cut.get(receipt.end, '')}")
        return IDENTICAL
    _say(f"{name}: different in {len(differences)} of {samples}")
    for difference in differences:
        _say(f"  {_describe(client, difference)}")
    for line in _node_lines(receipt, nodes):
        _say(f"  {line}")
    return DIFFERENT


def _say(text: str, file: TextIO | None = None) -> None:
    """Writes a line to standard output or `file`. Replaces control characters, which receipts and nodes may contain."""
    (file or sys.stdout).write(f"{printable(text)}\n")


def _describe(client: Client, found: Comparison) -> str:
    expected, computed = (_token_text(client, token_id) for token_id in (found.expected, found.computed))
    position, index = found.recorded.start_position + found.num_alike, found.num_alike
    return (
        f"sample {found.index}, position {position} (generated token {index}): expected {expected}, "
        f"computed {computed}; {describe_gap(found.gap)}"
    )


def _token_text(client: Client, token_id: int | None) -> str:
    if token_id is None:
        return "the end"
    try:
        return f"{token_id} {client.detokenize([token_id], skip_special_tokens=False)!r}"
    except OutriderError:  # a receipt may contain numbers that are no token ids
        return str(token_id)


def _node_lines(receipt: Receipt, nodes: tuple[NodeVersion, ...]) -> Iterator[str]:
    """Yields lines that compare the receipt's nodes with `nodes`, which computed the answer of this replay."""
    if not nodes:
        yield "the router does not say which nodes computed it now"
        return
    is_alike = True
    for what in ("numerics", "version"):
        then, now = (sorted({f"{node.role} {getattr(node, what)}" for node in each}) for each in (receipt.nodes, nodes))
        if then != now:
            is_alike = False
            yield f"{what} then: {', '.join(then)}; now: {', '.join(now)}"
    if is_alike:
        yield f"numerics and versions of the nodes are the same: {', '.join(map(str, nodes))}"


def _find(arguments: argparse.Namespace) -> Receipt:
    """Finds a receipt by its id. Raises: OutriderErrors."""
    where, request_id = arguments.receipts, arguments.receipt
    if where is None:
        config = load_arguments(arguments, sections_of("router"), role="router").sections["router"]
        where = config.store if config.receipts == "store" else config.receipts
    if not where:
        raise ConfigError(f"{request_id} is not a file; to find its receipt, set router.receipts or --receipts")
    if "://" in where:
        receipt = asyncio.run(_find_in_store(where, request_id))
    else:
        receipt = find_receipt(Path(where).expanduser(), request_id)
    if receipt is None:
        raise NotFoundError(f"there is no receipt of request {request_id!r} in {without_passwords(where)}")
    return receipt


async def _find_in_store(url: str, request_id: str) -> Receipt | None:
    from router.durability.receipts.valkey import ValkeyReceipts
    from router.store_address import store_address

    store = ValkeyReceipts(store_address(url), timeout_seconds=STORE_SECONDS)
    line = await store.find(request_id)
    await store.close()
    try:
        return None if line is None else Receipt.from_line(line)
    except ValueError as error:
        raise ConfigError(f"{store.name}: the receipt of request {request_id!r} is damaged: {error}") from error

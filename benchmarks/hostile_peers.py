"""Time between tokens of eight honest streams while one peer floods, lies, stalls or never reads.

    python benchmarks/hostile_peers.py [--model ID] [--streams 8] [--tokens 60] [--rounds 2] [--only router]

Real processes on this machine, one hostile peer at a time in a process of the lowest priority
(where it shares the processors with what it attacks, it must not be the scheduler that is
measured). Before each attack the streams run undisturbed. Tokens are compared. The goal is a
p99 of at most twice the undisturbed one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from outrider.client import Client
from outrider.cluster import Cluster, ClusterConfig, Launch
from outrider.model_hub.config import DEFAULT_MODEL_ID
from tests.faults.network import free_port
from tests.hostile_peers import CLIENTS, DRAFTERS, KINDS

PROMPT = [20 + (i * 7) % 200 for i in range(40)]
SETTLE_SECONDS = 2.0
"""After an attack: leases of silent sessions end."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time between tokens beside hostile peers.")
    parser.add_argument("--model", default=DEFAULT_MODEL_ID, help="an id or a directory; default: the default model")
    parser.add_argument("--streams", type=int, default=8, metavar="N")
    parser.add_argument("--tokens", type=int, default=60, metavar="N", help="of each stream; default 60")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument(
        "--head", type=float, default=1.0, metavar="S", help="a peer is hostile for so long before the streams begin"
    )
    parser.add_argument("--only", default="", help="kinds that contain this text")
    arguments = parser.parse_args()
    kinds = [kind for kind in (*CLIENTS, *DRAFTERS, *KINDS) if arguments.only in kind]
    with tempfile.TemporaryDirectory() as directory:
        draft_port = free_port("127.0.0.1")
        overrides = (f"model.id={arguments.model}", f"decode_node.draft_targets=127.0.0.1:{draft_port}")
        launch = Launch(overrides=overrides, log_directory=Path(directory) / "logs")
        with Cluster(ClusterConfig(port=0, draft="none", metrics=False), launch) as cluster:
            cluster.wait_serving()
            addresses = {
                "--router": cluster.router_address,
                "--decode": cluster.node("decode-0").address,
                "--draft-port": str(draft_port),
            }
            measure(cluster.router_address, addresses, kinds, arguments)


def measure(router_address: str, addresses: dict[str, str], kinds: list[str], arguments: argparse.Namespace) -> None:
    with Client(router_address) as client:
        tokens, _ = stream(client, arguments)  # once, not counted
        heads = f"{'undisturbed p99':>16} {'disturbed p99':>14} {'times':>6} {'same tokens':>12} {'hostile acts':>13}"
        print(f"{'':24} {heads}")
        for kind in kinds:
            quiet: list[float] = []
            loud: list[float] = []
            is_same, num_acts = True, 0
            for _ in range(arguments.rounds):
                found, gaps = stream(client, arguments)
                quiet += gaps
                is_same &= found == tokens
                with hostile(kind, addresses) as ended:
                    time.sleep(arguments.head)
                    found, gaps = stream(client, arguments)
                    loud += gaps
                    is_same &= found == tokens
                num_acts += ended.result()
                time.sleep(SETTLE_SECONDS)
            before, during = p99(quiet), p99(loud)
            shown = f"{before * 1e3:13.1f} ms {during * 1e3:11.1f} ms {during / before:6.2f}"
            print(f"{kind:24} {shown} {'yes' if is_same else 'NO':>12} {num_acts:13}", flush=True)


@contextmanager
def hostile(kind: str, addresses: dict[str, str]) -> Iterator[Future[int]]:
    """Runs the peer meanwhile; the future says how often it acted."""
    options = [word for pair in addresses.items() for word in pair]
    process = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, "-m", "tests.hostile_peers", kind, *options],  # noqa: S607
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    # Where Linux schedules sessions against each other, a low priority counts within the session only.
    group = Path(f"/proc/{process.pid}/autogroup")
    if group.exists():
        group.write_text("19")
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        ended: Future[int] = Future()
        yield ended
    finally:
        said, _ = process.communicate(timeout=60)
    ended.set_result(int(said))


def stream(client: Client, arguments: argparse.Namespace) -> tuple[list[tuple[int, ...]], list[float]]:
    """(token ids of each stream, seconds between deltas of all streams together)."""
    with ThreadPoolExecutor(arguments.streams) as pool:
        answers = list(pool.map(lambda seed: one_stream(client, seed, arguments.tokens), range(arguments.streams)))
    return [tokens for tokens, _ in answers], [gap for _, gaps in answers for gap in gaps]


def one_stream(client: Client, seed: int, num_tokens: int) -> tuple[tuple[int, ...], list[float]]:
    gaps: list[float] = []
    last_at: float | None = None
    with client.generate(PROMPT, max_tokens=num_tokens, seed=seed, ignore_eos=True) as answer:
        for delta in answer:
            now = time.monotonic()
            if last_at is not None and delta.token_ids:
                gaps.append(now - last_at)
            last_at = now
        return answer.token_ids(), gaps


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


if __name__ == "__main__":
    main()

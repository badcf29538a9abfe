"""Continues an answer after the loss of its node: the next attempt sends back the tokens that have arrived.

With a seed (or temperature 0) the answer is the same as that of an undisturbed call.

python examples/go_on_after_a_loss.py [HOST:PORT]
"""

from __future__ import annotations

import sys
import time

from outrider.client import Client
from outrider.errors import PeerLostError

PROMPT = "A short history of the bicycle:"
MAX_TRIES = 10


def main(target: str) -> None:
    token_ids: list[int] = []
    with Client(target) as client:
        sampling = client.model().default_sampling or {"temperature": 0.7}
        for _ in range(MAX_TRIES):
            try:
                with client.generate(
                    PROMPT, **sampling, seed=3, max_tokens=96, generated_token_ids=token_ids
                ) as stream:
                    for delta in stream:
                        token_ids += delta.token_ids
                        print(delta.text, end="", flush=True)
                break
            except PeerLostError as error:
                print(f"\n[{error}; again in {error.retry_after_seconds:g} s]", file=sys.stderr)
                time.sleep(error.retry_after_seconds)
    print(f"\n[{len(token_ids)} tokens]")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")

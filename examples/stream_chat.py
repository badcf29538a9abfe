"""A chat of two turns, streamed.

python examples/stream_chat.py [HOST:PORT]
"""

from __future__ import annotations

import sys

from outrider.client import ChatMessage, Client


def main(target: str) -> None:
    messages = [ChatMessage("system", "You answer in one sentence.")]
    with Client(target) as client:
        sampling = client.model().default_sampling or {"temperature": 0.7, "top_p": 0.95}
        for question in ("What is a tide?", "And why are there two a day?"):
            messages.append(ChatMessage("user", question))
            print(f"> {question}")
            with client.generate(messages, **sampling, seed=1, max_tokens=48) as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
            print()
            messages.append(ChatMessage("assistant", stream.text()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")

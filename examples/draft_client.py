"""Uses only a draft node, which drafts for any engine that can verify drafts (docs/protocol.md, "Draft stream").

python examples/draft_client.py HOST:PORT

The example needs no target model: a fixed text stands in for one. The client sends the text's beginning as a prompt and
then, step by step, the tokens that a target would have committed. It prints branches as they arrive, including those of
look-ahead.
"""

from __future__ import annotations

import os
import queue
import struct
import sys
from collections.abc import Iterator, Sequence

import grpc
import xxhash

from outrider.v1 import draft_pb2, draft_pb2_grpc, node_pb2, node_pb2_grpc, router_pb2

PROTOCOL_VERSION = 3
SEQUENCE_ID = 1
NUM_WANTED = 4
PERIOD = [11, 42, 7, 93, 120, 5, 66]
TEXT = [*(PERIOD * 10)[:64], 17, 3, *(PERIOD * 2)]  # repeats itself, except for two tokens
PROMPT_LENGTH = 24


def prefix_hash(token_ids: Sequence[int]) -> int:
    """Returns the xxh3-64 of the ids, each as four little-endian bytes."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(token_ids)}I", *token_ids))


def hello(model: node_pb2.ModelInfo) -> draft_pb2.DraftUpdate:
    """Makes the first message. An engine sends its own vocabulary, which must match; this client copies the node's."""
    return draft_pb2.DraftUpdate(
        hello=draft_pb2.DraftHello(
            protocol_version=PROTOCOL_VERSION,
            oldest_protocol_version=PROTOCOL_VERSION,
            incarnation=os.urandom(16),
            name="examples/draft_client.py",
            vocab_size=model.vocab_size or 1000,
            vocabulary_fingerprint=model.vocabulary_fingerprint,
            max_model_len=model.max_model_len or 2048,
        )
    )


def update(num_committed: int, num_acknowledged: int) -> draft_pb2.DraftUpdate:
    """Makes the newest state: the tokens that the node lacks, and the number of draft tokens wanted after them."""
    sequence = draft_pb2.SequenceUpdate(
        sequence_id=SEQUENCE_ID,
        start_length=num_acknowledged,
        token_ids=TEXT[num_acknowledged:num_committed],
        length=num_committed,
        prefix_hash=prefix_hash(TEXT[:num_committed]),
        num_wanted=NUM_WANTED,
    )
    if num_acknowledged == 0:  # the node knows nothing: send the sampling parameters, too
        sampling = router_pb2.SamplingParams(temperature=0.0, seed=7, max_tokens=len(TEXT) - PROMPT_LENGTH)
        options = node_pb2.RequestOptions(sampling=sampling)
        sequence.start.CopyFrom(draft_pb2.SequenceStart(options=options, prompt_length=PROMPT_LENGTH))
    return draft_pb2.DraftUpdate(sequences=[sequence], step_microseconds=20_000)


def num_accepted(branch: draft_pb2.Branch, num_committed: int) -> int:
    """Returns how many tokens a target that writes TEXT would accept after the committed ones; 0 if prefixes differ."""
    if branch.length > num_committed or branch.prefix_hash != prefix_hash(TEXT[: branch.length]):
        return 0
    num_agreeing = 0
    for drafted, right in zip(branch.token_ids, TEXT[branch.length :], strict=False):
        if drafted != right:
            break
        num_agreeing += 1
    return max(0, branch.length + num_agreeing - num_committed)


class Outbox:
    """The messages to send, as the iterator that gRPC reads them from."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[draft_pb2.DraftUpdate | None] = queue.SimpleQueue()

    def put(self, message: draft_pb2.DraftUpdate) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Closes the sequence, then the stream."""
        self.put(draft_pb2.DraftUpdate(sequences=[draft_pb2.SequenceUpdate(sequence_id=SEQUENCE_ID, closed=True)]))
        self._messages.put(None)

    def __iter__(self) -> Iterator[draft_pb2.DraftUpdate]:
        return iter(self._messages.get, None)


def main(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        info = node_pb2_grpc.NodeServiceStub(channel).GetNode(node_pb2.GetNodeRequest(), timeout=10)
        print(f"{info.name} drafts by {info.model.proposer}")
        outgoing = Outbox()
        outgoing.put(hello(info.model))
        outgoing.put(update(PROMPT_LENGTH, 0))
        incoming = draft_pb2_grpc.DraftServiceStub(channel).Draft(iter(outgoing), timeout=60)
        num_committed = PROMPT_LENGTH
        for message in incoming:  # the first message has the node's hello and no answers
            for answer in message.sequences:
                for branch in answer.branches:
                    print(f"  after {branch.length:3}: {list(branch.token_ids)}")
                match answer.status:
                    case draft_pb2.DRAFT_STATUS_AHEAD | draft_pb2.DRAFT_STATUS_CATCHING_UP:
                        continue  # look-ahead is no answer, and after CATCHING_UP another answer comes
                    case draft_pb2.DRAFT_STATUS_UNKNOWN_PREFIX:
                        outgoing.put(update(num_committed, 0))
                        continue
                    case draft_pb2.DRAFT_STATUS_NO_ROOM:
                        sys.exit("the node has no room")
                # A target step commits the accepted tokens and one more. An engine keeps branches for later steps.
                best = max((num_accepted(branch, num_committed) for branch in answer.branches), default=0)
                num_committed = min(num_committed + best + 1, len(TEXT))
                print(f"{best} accepted, {num_committed} tokens committed")
                if num_committed == len(TEXT):
                    outgoing.close()
                else:
                    outgoing.put(update(num_committed, answer.acked_length))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else sys.exit("python examples/draft_client.py HOST:PORT of a draft node"))

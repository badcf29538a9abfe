"""Clients of draft nodes: decode nodes, and other engines by `Client`. Torch-free; needs no service around it.

from outrider.drafting import Client, vocabulary_of

vocabulary = vocabulary_of(Path("model/tokenizer.json").read_bytes())
with Client("127.0.0.1:50054", vocabulary=vocabulary, vocab_size=49152, max_model_len=2048) as client:
    while texts:  # one array of all token ids for each sequence in the batch
        drafts = client.propose(texts, num_tokens=4)
        texts = verify_and_extend(texts, drafts)  # the engine's own step
"""

from __future__ import annotations

from outrider.drafting.client import Client, ClientStatus, vocabulary_of

__all__ = ["Client", "ClientStatus", "vocabulary_of"]

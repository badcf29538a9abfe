"""DSpark: a DFlash head whose tokens are decided one after another, each by logits that know the token before it.

The block's forward is DFlash's. A low-rank Markov head then adds to the logits of each token what the previous token
says about it: logits + bias(embedding(previous token)). A confidence head estimates the probability that the target
accepts a token.

Source: arXiv 2607.05147. Layouts: speculators (`speculators_model_type` dspark), and the flat ones of DeepSpec
(`Qwen3DSparkModel`) and SpecForge (`DSparkDraftModel`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from outrider.heads.forms.dflash import DFlash
from outrider.heads.head_files import HeadFiles

_KINDS = ("vanilla", "gated", "rnn")
_DEFAULT_RANK = 256


class DSpark(DFlash):
    """A DSpark head."""

    form = "dspark"
    architectures = ("Qwen3DSparkModel", "DSparkDraftModel")
    flags = (*DFlash.flags, "enable_confidence_head", "confidence_head_with_markov")
    is_chained = True
    samples_from_anchor = True

    def load(self, files: HeadFiles) -> None:
        options, hidden = self._options, self._layout.shape.hidden_size
        self._rank = rank = int(options.get("markov_rank", _DEFAULT_RANK))
        self._kind = options.get("markov_head_type", _KINDS[0])
        # Without the anchor's draft, the published code would begin the state of "rnn" with a row that drafts nothing.
        kinds = _KINDS if options.get("sample_from_anchor", True) else _KINDS[:2]
        if rank < 1:
            raise files.refusal("markov_rank", rank, "at least 1")
        if self._kind not in kinds:
            raise files.refusal("markov_head_type", self._kind, ", ".join(kinds))
        self._embeddings_before = files.take("markov_head.markov_w1.weight", files.target.vocab_size, rank)
        self._bias = files.take_linear({"markov_head.markov_w2": self._layout.draft_vocab_size}, rank)
        if self._kind == "gated":
            self._gate = files.take_linear({"markov_head.gate_proj": rank}, hidden + rank)
        elif self._kind == "rnn":
            self._gate = files.take_linear({"markov_head.joint_proj": 3 * rank}, 2 * rank + hidden)
        self._confidence = None
        if options.get("enable_confidence_head", True):
            self._knows_token = bool(options.get("confidence_head_with_markov", True))
            width = hidden + rank * self._knows_token
            self._confidence = files.take_linear({"confidence_head.proj": 1}, width)
        super().load(files)

    def logits_after(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._kind != "rnn":  # only a recurrent state knows tokens before the previous one
            hidden, previous = hidden[:, -1:], previous[:, -1:]
        states, before = self._normed(hidden), embedding(previous, self._embeddings_before)
        logits = logits + self._bias(self._known(states, before)).float()
        if self._confidence is None:
            return logits, None
        state, token = states[:, -1], before[:, -1]
        return logits, self._confidence(torch.cat([state, token], -1) if self._knows_token else state)[:, 0].float()

    def _known(self, states: Tensor, before: Tensor) -> Tensor:
        """Returns [n, rank]: what the Markov head knows of the tokens before the one that the last row drafts.

        `states`: [n, num_rows, width], normed. `before`: [n, num_rows, rank], embeddings of the previous tokens.
        """
        if self._kind == "vanilla":
            return before[:, -1]
        if self._kind == "gated":
            return torch.sigmoid(self._gate(torch.cat([states, before], -1)[:, -1])) * before[:, -1]
        memory = torch.zeros_like(before[:, 0])
        for row in range(before.shape[1]):
            joined = self._gate(torch.cat([memory, before[:, row], states[:, row]], -1))
            kept, new, out = joined.chunk(3, -1)
            share = torch.sigmoid(kept)
            memory = share * memory + (1.0 - share) * torch.tanh(new)
        return torch.tanh(out)

"""A proposer for vLLM's hook `custom_class`, which gets its drafts from draft nodes (docs/drafting.md).

    OUTRIDER_DRAFT_NODES=127.0.0.1:50054 vllm serve MODEL --speculative-config \
      '{"method": "custom_class", "model": "outrider.integrations.vllm.Proposer", "num_speculative_tokens": 4}'

vLLM verifies the drafts itself. The hook gives token ids and no hidden states, so a draft node with a head is refused.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.drafting.client import Client, vocabulary_of
from outrider.errors import OutriderError
from outrider.rpc.tls import PeerSecurity, SecurityConfig, TlsConfig

DRAFT_NODES_VARIABLE = "OUTRIDER_DRAFT_NODES"
"""HOST:PORT of each draft node, separated by commas. In `additional_config`, a new address would make vLLM compile the
model again.
"""
SETTINGS = ("vocabulary", "max_wait_seconds", "tls", "peer_name")
TOKENIZER_FILE = "tokenizer.json"

_log = logging.getLogger("vllm.outrider")  # below vLLM's own logger, which has a handler


class Proposer:
    """The class that vLLM 0.32 makes by its `speculative_config`, and asks once after each step."""

    def __init__(self, vllm_config: Any) -> None:
        """Begins to connect.

        Raises: ValueError without draft nodes or for unknown settings, ConfigError for unreadable certificates.
        """
        targets = list(filter(None, map(str.strip, os.environ.get(DRAFT_NODES_VARIABLE, "").split(","))))
        if not targets:
            raise ValueError(f"{DRAFT_NODES_VARIABLE} must have HOST:PORT of each draft node, separated by commas")
        model = vllm_config.model_config
        options = client_options((vllm_config.additional_config or {}).get("outrider") or {})
        self._num_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._is_broken = False
        self._client = Client(
            targets,
            vocabulary=options.pop("vocabulary", "") or _vocabulary(model),
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            name=f"vllm@{socket.gethostname()}:{os.getpid()}",
            logger=_log,
            **options,
        )

    def load_model(self, *_args: Any, **_fields: Any) -> None:
        """Loads nothing: drafters are in draft nodes."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns a draft for each row of the batch; empty where there is none. Never raises.

        Args:
            sampled_token_ids: what the step has committed for each row; empty for a prompt that is not read entirely.
            num_tokens_no_spec: tokens of each row, those included: [at least number of rows].
            token_ids_cpu: these tokens: [at least number of rows, max_model_len].
            slot_mappings: not used.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._is_broken:
            return drafts
        try:
            rows = [row for row, sampled in enumerate(sampled_token_ids) if len(sampled)]
            found = self._client.propose(
                [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows], num_tokens=self._num_tokens
            )
        except Exception:  # noqa: BLE001 the engine must not end because of a drafter
            _log.exception("no more drafts: the client of draft nodes has failed")
            self._is_broken = True
            return drafts
        for row, draft in zip(rows, found, strict=True):
            drafts[row] = draft
        return drafts


def client_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of a Client for `outrider` in vLLM's `additional_config` (docs/drafting.md).

    Raises: ValueError for unknown settings.
    """
    options = dict(settings)
    if unknown := options.keys() - SETTINGS:
        raise ValueError(f"additional_config.outrider has {', '.join(sorted(unknown))}, not {', '.join(SETTINGS)}")
    tls = TlsConfig(**{name: Path(file) for name, file in options.pop("tls", {}).items()})
    peer_name = options.pop("peer_name", SecurityConfig().peer_name)
    return {**options, "security": PeerSecurity(SecurityConfig(tls=tls, peer_name=peer_name))}


def _vocabulary(model_config: Any) -> str:
    """Returns the fingerprint of the model's tokenizer; empty if it has no tokenizer.json, which lookups do without."""
    try:
        path = Path(model_config.tokenizer) / TOKENIZER_FILE
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(
                hf_hub_download(model_config.tokenizer, TOKENIZER_FILE, revision=model_config.tokenizer_revision)
            )
        return vocabulary_of(path.read_bytes())
    except (OSError, ValueError, ImportError, OutriderError) as error:
        _log.warning("no %s (%s): draft models need the setting `vocabulary`", TOKENIZER_FILE, error)
        return ""

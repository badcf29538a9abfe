"""Our proposer for vLLM with a switch, for `vllm_proposer.py`: while the switch's file exists, it does nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.integrations.vllm import Proposer

SWITCH_VARIABLE = "OUTRIDER_PROPOSER_OFF"


class SwitchedProposer(Proposer):
    """Returns no drafts, and asks for none, while the file named by SWITCH_VARIABLE exists."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._off = Path(os.environ[SWITCH_VARIABLE])

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *arguments: Any, **fields: Any) -> list[list[int]]:
        if self._off.exists():
            return [[] for _ in sampled_token_ids]
        return super().propose(sampled_token_ids, *arguments, **fields)

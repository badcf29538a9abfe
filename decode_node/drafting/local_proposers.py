"""Proposers in the decode node that need no features: lookups, and the grammar's."""

from __future__ import annotations

from decode_node.config import DecodeNodeConfig
from decode_node.drafting.gather import log_failed_proposer
from outrider.speculation.proposers.factory import NO_PROPOSER, make_proposer
from outrider.speculation.proposers.grammar import GrammarProposer
from outrider.speculation.proposers.isolated import IsolatedProposer


def open_local_proposers(config: DecodeNodeConfig) -> list[IsolatedProposer]:
    """The lookup that `decode_node.local_fallback` names, if one, and what grammars force."""
    name = config.local_fallback
    proposers = [*([] if name == NO_PROPOSER else [make_proposer(name)]), GrammarProposer()]
    return [IsolatedProposer(proposer, on_failure=log_failed_proposer) for proposer in proposers]

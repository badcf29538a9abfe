"""Proposers in the decode node that need no features: lookups, and the grammar's."""

from __future__ import annotations

from decode_node.config import DecodeNodeConfig
from decode_node.drafting.gather import log_failed_proposer
from outrider.constraints.base import ConstraintCompiler
from outrider.speculation.proposers.factory import NO_PROPOSER, make_proposer
from outrider.speculation.proposers.grammar import GrammarProposer
from outrider.speculation.proposers.isolated import IsolatedProposer


def open_lookups(config: DecodeNodeConfig) -> list[IsolatedProposer]:
    """None, or the one that `decode_node.local_fallback` names."""
    if config.local_fallback == NO_PROPOSER:
        return []
    return [IsolatedProposer(make_proposer(config.local_fallback), on_failure=log_failed_proposer)]


def open_grammar(constraints: ConstraintCompiler) -> IsolatedProposer:
    """Of what grammars force."""
    return IsolatedProposer(GrammarProposer(constraints), on_failure=log_failed_proposer)

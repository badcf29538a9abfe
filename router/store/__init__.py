"""Where requests with a resume window are kept. Read base.py first."""

from router.store.base import AnswerStore, Renewal, StoredAnswer, StoredRequest, TokenSpan
from router.store.factory import make_store

__all__ = ["AnswerStore", "Renewal", "StoredAnswer", "StoredRequest", "TokenSpan", "make_store"]

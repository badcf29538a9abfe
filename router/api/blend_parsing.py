"""Validates the pieces of blended prompts."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import InvalidRequestError
from outrider.request import DEFAULT_RECOMPUTE_SHARE, Blend
from outrider.v1 import router_pb2
from router.text.tokenizer import MAX_PIECES

MIN_REUSED_TOKENS = 16
"""Minimum tokens of a piece to reuse: prefix caches hold whole blocks, which usually have 16 tokens."""


def check_blend(proto: router_pb2.GenerateRequest) -> None:
    """Checks `blend`, if it is set. Raises: InvalidRequestError."""
    if not proto.HasField("blend"):
        return
    blend, has_tokens = proto.blend, proto.HasField("token_ids")
    lengths, num_tokens = blend.piece_lengths, len(proto.token_ids.ids)
    for is_allowed, field, message in (
        (not proto.output.HasField("prompt_logprobs"), "output.prompt_logprobs", "prompt_logprobs require no blend"),
        (0 <= _share(blend) <= 1, "blend.recompute_share", f"recompute_share must be 0 to 1, not {_share(blend)}"),
        (
            has_tokens != bool(blend.separator),
            "blend.separator",
            "a separator is required of texts and chats, and not allowed of token_ids",
        ),
        (has_tokens or not lengths, "blend.piece_lengths", "piece_lengths require token_ids"),
        (len(lengths) <= MAX_PIECES, "blend.piece_lengths", f"a prompt may have at most {MAX_PIECES} pieces"),
        (
            not lengths or (min(lengths) > 0 and sum(lengths) <= num_tokens),
            "blend.piece_lengths",
            f"pieces must have at least one token each, and together at most the prompt's {num_tokens}",
        ),
    ):
        if not is_allowed:
            raise InvalidRequestError(message, field=field)


def read_blend(proto: router_pb2.GenerateRequest, piece_lengths: Sequence[int]) -> Blend | None:
    """Returns how to blend; None if the request does not allow it, or no piece after the first is long enough.

    `piece_lengths`: of pieces that separators end.
    """
    lengths = proto.blend.piece_lengths if proto.HasField("token_ids") else piece_lengths
    if max(lengths[1:], default=0) < MIN_REUSED_TOKENS:
        return None
    return Blend(piece_lengths=tuple(lengths), recompute_share=_share(proto.blend))


def _share(blend: router_pb2.Blend) -> float:
    return blend.recompute_share if blend.HasField("recompute_share") else DEFAULT_RECOMPUTE_SHARE

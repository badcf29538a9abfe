"""Validates the pieces of blended prompts."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.node import ModelInfo
from outrider.request import DEFAULT_RECOMPUTE_SHARE, MAX_PIECES, Blend
from outrider.v1 import router_pb2

MAX_SEPARATOR_BYTES = 256


def check_blend(proto: router_pb2.GenerateRequest, model: ModelInfo) -> None:
    """Checks `blend`, if it is set. Raises: InvalidRequestError; NotSupportedError if the model cannot be blended."""
    if not proto.HasField("blend"):
        return
    if model.no_blend:
        raise NotSupportedError(f"prompts of {model.name} cannot be blended: {model.no_blend}", field="blend")
    blend, has_tokens = proto.blend, proto.HasField("token_ids")
    num_bytes = len(blend.separator.encode())
    for is_allowed, field, message in (
        (
            not proto.output.HasField("prompt_logprobs"),
            "output.prompt_logprobs",
            "prompt_logprobs of a blended prompt are not known",
        ),
        (0 <= _share(blend) <= 1, "blend.recompute_share", f"recompute_share must be 0 to 1, not {_share(blend)}"),
        (not (has_tokens and num_bytes), "blend.separator", "a separator requires a text or a chat"),
        (
            has_tokens or 0 < num_bytes <= MAX_SEPARATOR_BYTES,
            "blend.separator",
            f"a text or a chat requires a separator of 1 to {MAX_SEPARATOR_BYTES} bytes, not {num_bytes}",
        ),
        (has_tokens or not blend.piece_lengths, "blend.piece_lengths", "piece_lengths require token_ids"),
        (min(blend.piece_lengths, default=1) > 0, "blend.piece_lengths", "each piece must have at least one token"),
        (
            not has_tokens or sum(blend.piece_lengths) <= len(proto.token_ids.ids),
            "blend.piece_lengths",
            f"the pieces must not have more tokens than the prompt's {len(proto.token_ids.ids)}",
        ),
    ):
        if not is_allowed:
            raise InvalidRequestError(message, field=field)
    _check_number(blend.piece_lengths, field="blend.piece_lengths")


def read_blend(proto: router_pb2.GenerateRequest, piece_lengths: Sequence[int]) -> Blend | None:
    """Returns how to blend; None if the request does not allow it. `proto` must have passed `check_blend`.

    `piece_lengths`: of the pieces that separators end. Raises: InvalidRequestError if there are too many.
    """
    if not proto.HasField("blend"):
        return None
    _check_number(piece_lengths, field="blend.separator")
    lengths = proto.blend.piece_lengths if proto.HasField("token_ids") else piece_lengths
    return Blend(piece_lengths=tuple(lengths), recompute_share=_share(proto.blend))


def _share(blend: router_pb2.Blend) -> float:
    return blend.recompute_share if blend.HasField("recompute_share") else DEFAULT_RECOMPUTE_SHARE


def _check_number(piece_lengths: Sequence[int], *, field: str) -> None:
    if len(piece_lengths) > MAX_PIECES:
        message = f"the prompt has {len(piece_lengths)} pieces; at most {MAX_PIECES} are allowed"
        raise InvalidRequestError(message, field=field)

"""Figures of an answer in its call's trailers, where any gRPC tool can show them."""

from __future__ import annotations

from outrider.request import VerificationMethod
from router.request_record import RequestRecord

TOKENS_KEY = "outrider-tokens"
TTFT_KEY = "outrider-ttft-ms"
STORE_KEY = "outrider-store"
ACCEPTANCE_LENGTH_KEY = "outrider-acceptance-length"
VERIFICATION_KEY = "outrider-verification"

Trailers = tuple[tuple[str, str], ...]

NOTHING_GENERATED: Trailers = ((TOKENS_KEY, "0"),)
"""Of a call that was refused before it became a request."""


def answer_trailers(
    record: RequestRecord,
    *,
    num_generated_tokens: int,
    method: VerificationMethod = VerificationMethod.COUPLED,
    is_kept: bool = True,
) -> Trailers:
    """What there is to tell: a figure that was never measured is left out, not zero.

    `is_kept`: False for a resumable request that the store does not have.
    """
    trailers = [(TOKENS_KEY, str(num_generated_tokens))]
    if record.first_token_at is not None:
        trailers.append((TTFT_KEY, f"{record.ttft_seconds * 1e3:.1f}"))
    mean_acceptance_length = record.speculation.metrics().mean_acceptance_length
    if mean_acceptance_length:
        trailers.append((ACCEPTANCE_LENGTH_KEY, f"{mean_acceptance_length:.2f}"))
    if method is not VerificationMethod.COUPLED:
        trailers.append((VERIFICATION_KEY, method.label))
    if not is_kept:
        trailers.append((STORE_KEY, "lost"))
    return tuple(trailers)

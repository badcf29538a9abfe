"""Computes a receipt's answer again without drafts, and compares both answers token by token (`outrider replay`)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.answer import Delta
from outrider.client.sync import Client
from outrider.errors import AbortedError, InvalidRequestError, MismatchError
from outrider.node import Model
from outrider.node_stamp import NODES_KEY, NodeVersion, parse_node_versions
from outrider.receipt import Receipt, ReceiptSample
from outrider.request import Adapter, VerificationMethod
from outrider.v1 import router_pb2
from outrider.wire.enums import VERIFICATION_METHODS
from outrider.wire.receipt import request_from_receipt


@dataclass(slots=True)
class Comparison:
    """Compares one sample token by token, up to the first difference. Later tokens cannot be compared."""

    index: int
    recorded: ReceiptSample
    num_alike: int = 0
    is_different: bool = False
    computed: int | None = None  # the new answer's token that differs; None: that answer has ended
    gap: float | None = None  # between the two best logprobs at that position, as the sampler saw them; None: unknown

    @property
    def expected(self) -> int | None:
        """The next token of the receipt; None at its end."""
        known = self.recorded.token_ids
        return known[self.num_alike] if self.num_alike < len(known) else None

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to compare. The comparison with a truncated receipt ends at its last token."""
        return self.is_different or (self.expected is None and not self.recorded.is_whole)

    def take(self, delta: Delta) -> None:
        for offset, token_id in enumerate(delta.token_ids):
            if self.has_ended:
                return
            if token_id == self.expected:
                self.num_alike += 1
            else:
                self.is_different, self.computed = True, token_id
                self.gap = delta.logprobs[offset].gap if offset < len(delta.logprobs) else None

    def end(self) -> None:
        """Ends the comparison when the answer has ended."""
        self.is_different |= not self.has_ended and self.expected is not None


def replay_obstacle(receipt: Receipt) -> str:
    """Returns why a receipt cannot be replayed, or "" if it can. Raises: InvalidRequestError if it is damaged."""
    request = _request_of(receipt)
    if request.HasField("blend"):
        return "its prompt may have been blended, so that its tokens depend on the nodes that computed it"
    method = VERIFICATION_METHODS.from_proto_or(None).from_proto(request.speculation.method)
    if method is VerificationMethod.COUPLED:
        return "" if any(sample.token_ids for sample in receipt.samples) else "it has no tokens to compare"
    label = "a method that this version does not know" if method is None else method.label
    return f"its drafts were verified by {label}, so that its tokens depend on drafts, which a receipt does not have"


def check_model(receipt: Receipt, served: Model) -> None:
    """Checks that the served model, and the request's adapter, are the receipt's. Raises: MismatchError."""
    if receipt.model.fingerprint != served.fingerprint:
        raise MismatchError(
            f"request {receipt.request_id!r} was answered by {receipt.model.name} in {receipt.model.dtype} with "
            f"fingerprint {receipt.model.fingerprint}; the served model, {served.name} in {served.dtype} with "
            f"fingerprint {served.fingerprint}, is not comparable"
        )
    request = _request_of(receipt)
    adapter = Adapter(request.model, request.adapter_fingerprint)
    if adapter.fingerprint and adapter not in served.adapters:
        found = ", ".join(map(str, served.adapters)) or "none"
        raise MismatchError(
            f"request {receipt.request_id!r} was answered with the adapter {adapter}; the served ones are {found}"
        )


def replay(client: Client, receipt: Receipt) -> tuple[list[Comparison], tuple[NodeVersion, ...]]:
    """Repeats a receipt's request, and compares the tokens. Aborts the request when nothing is left to compare.

    Returns a comparison for each sample, and the nodes that computed the answer if the router reports them.
    Raises: OutriderErrors.
    """
    request = _request_of(receipt)
    for field in ("request_id", "priority", "resume_window"):  # no token depends on these
        request.ClearField(field)
    if not request.adapter_fingerprint:
        request.ClearField("model")  # the model may have another name here
    request.output.ClearField("prompt_logprobs")  # skip_special_tokens is kept, since it affects stop strings
    request.speculation.enabled = False
    request.output.top_logprobs = 2
    request.output.logprobs_mode = router_pb2.LOGPROBS_MODE_SAMPLED
    request.output.token_ids_only = True
    samples = [Comparison(index, sample) for index, sample in enumerate(receipt.samples)]
    was_stopped = False
    with client.generate_message(request) as stream:
        for delta in stream:
            if delta.sample < len(samples):
                samples[delta.sample].take(delta)
            if not was_stopped and all(sample.has_ended for sample in samples):
                was_stopped = True
                client.abort(stream.request_id)  # a cancelled call would have no trailers
        trailers = stream.trailers()
    for sample in samples:
        finished = stream.finished.get(sample.index)
        if not sample.has_ended and (finished is None or finished.reason.value == "aborted"):
            raise AbortedError(f"the replay of request {receipt.request_id!r} was aborted")
        sample.end()
    return samples, parse_node_versions(trailers.get(NODES_KEY, ""))


def describe_gap(gap: float | None) -> str:
    """Describes how much less likely the second-best token was."""
    return f"gap between the two best logprobs there: {'unknown' if gap is None else f'{gap:.2e}'}"


def _request_of(receipt: Receipt) -> router_pb2.GenerateRequest:
    """Returns the receipt's request. Raises: InvalidRequestError if the receipt is damaged."""
    try:
        request = request_from_receipt(receipt.request)
        num_samples = request.sampling.n if request.sampling.HasField("n") else 1
        start = len(request.token_ids.ids) + len(request.generated_token_ids)
        if len(receipt.samples) != num_samples:
            raise ValueError(f"it has {len(receipt.samples)} samples instead of {num_samples}")
        if any(sample.start_position != start for sample in receipt.samples):
            raise ValueError(f"its samples do not begin at position {start}")
    except ValueError as error:
        raise InvalidRequestError(f"the receipt of request {receipt.request_id!r}: {error}", field="receipt") from error
    return request

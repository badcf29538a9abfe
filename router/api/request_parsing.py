"""A public request to a complete one: checked, encoded, defaults filled in."""

from __future__ import annotations

import secrets

from outrider.request import Request, VerificationMethod
from outrider.v1 import router_pb2
from outrider.wire.request import chat_from_proto, constraint_from_proto, request_from_proto, skips_special_tokens
from router.api.clients import Caller
from router.api.validation import check_prompt
from router.nodes.directory import ServedModel
from router.text.chat_template import ChatTemplate

MAX_RESUME_WINDOW_SECONDS = 3600.0
"""Of longer windows an hour counts: answers that nobody comes back to take memory, here and in the store."""
SEED_LIMIT = 1 << 53
"""Drawn seeds are exact in every language's floating-point numbers."""


async def read_request(
    proto: router_pb2.GenerateRequest,
    served: ServedModel,
    caller: Caller,
    *,
    request_id: str,
    default_method: VerificationMethod = VerificationMethod.COUPLED,
) -> Request:
    """The request that nodes will see. `proto` has passed `check_request`.

    `default_method`: how drafts are verified where the request does not say.

    Raises: InvalidRequestError when the prompt does not fit or a constraint does not compile; CapacityError when too
    many texts or constraints wait.
    """
    token_ids = await encode_prompt(proto, served, client=caller.share)
    max_tokens = check_prompt(proto, token_ids, served.info)
    constraint = constraint_from_proto(proto.sampling)
    if constraint is not None:
        await served.constraints.check(constraint, client=caller.share)
    prompt_text = ""
    if proto.output.echo and not proto.output.token_ids_only and not proto.generated_token_ids:
        skip = skips_special_tokens(proto.output)
        prompt_text = await served.tokenizer.decode(token_ids, skip_special_tokens=skip, client=caller.share)
    seed = proto.sampling.seed if proto.sampling.HasField("seed") else secrets.randbelow(SEED_LIMIT)
    return request_from_proto(
        proto,
        request_id=request_id,
        prompt_token_ids=token_ids,
        prompt_text=prompt_text,
        seed=seed,
        max_tokens=max_tokens,
        eos_token_ids=served.info.eos_token_ids,
        cache_salt=caller.cache_salt,
        default_method=default_method,
    )


def resume_window_seconds(proto: router_pb2.GenerateRequest) -> float | None:
    """At most `MAX_RESUME_WINDOW_SECONDS`. None: the answer ends with its stream."""
    if not proto.HasField("resume_window"):
        return None
    return min(proto.resume_window.seconds + proto.resume_window.nanos / 1e9, MAX_RESUME_WINDOW_SECONDS)


async def encode_prompt(
    proto: router_pb2.GenerateRequest | router_pb2.TokenizeRequest, served: ServedModel, *, client: str = ""
) -> list[int]:
    """Raises: InvalidRequestError when the chat template refuses the messages or the window is too small for certain.

    CapacityError when too many texts wait.
    """
    tokenizer, max_tokens = served.tokenizer, served.info.max_model_len
    if isinstance(proto, router_pb2.GenerateRequest) and proto.HasField("token_ids"):
        return list(proto.token_ids.ids)
    if proto.HasField("chat"):

        def render(template: ChatTemplate) -> str:
            messages, variables = chat_from_proto(proto.chat)
            return template.render(messages, **variables)

        return await tokenizer.encode_chat(
            render,
            num_bytes=proto.chat.ByteSize(),
            client=client,
            max_tokens=max_tokens,
        )
    return await tokenizer.encode_text(proto.text, client=client, max_tokens=max_tokens)

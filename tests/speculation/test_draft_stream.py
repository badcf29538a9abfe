"""Which decode nodes and draft nodes fit together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.errors import MismatchError
from outrider.node import FeatureFormat, ModelInfo, NodeInfo, NodeRole, NodeState
from outrider.speculation.draft_stream import check_fits
from tests.support.draft_messages import hello_of

FEATURES = FeatureFormat(fingerprint="ab" * 32, width=576, dtype="float32", taps=(2, 15, 28))


def draft_node(features: FeatureFormat | None) -> NodeInfo:
    model = ModelInfo(
        name="head",
        vocab_size=0,
        max_model_len=0,
        eos_token_ids=(),
        dtype="",
        fingerprint="",
        vocabulary_fingerprint="",
        features=features,
    )
    return NodeInfo(
        incarnation=bytes(16),
        name="draft@1",
        role=NodeRole.DRAFT,
        state=NodeState.SERVING,
        version="",
        model=model,
    )


@pytest.mark.parametrize(
    "computed",
    [
        None,
        replace(FEATURES, fingerprint="cd" * 32),
        replace(FEATURES, width=960),
        replace(FEATURES, dtype="bfloat16"),
        replace(FEATURES, taps=(2, 15, 27)),
    ],
    ids=["none", "fingerprint", "width", "dtype", "taps"],
)
def test_a_head_of_other_features_is_refused_and_both_sides_are_named(computed):
    with pytest.raises(MismatchError) as caught:
        check_fits(hello_of(name="decode@2", features=computed), draft_node(FEATURES))
    assert caught.value.reason == "FEATURE_MISMATCH"
    for named in ("draft@1", "decode@2", str(FEATURES), str(computed or "none")):
        assert named in caught.value.message


def test_a_peer_that_names_endless_features_gets_a_short_answer():
    endless = FeatureFormat(fingerprint="a" * 10_000, width=2**32 - 1, dtype="b" * 10_000, taps=(2**32 - 1,) * 10_000)
    with pytest.raises(MismatchError) as caught:
        check_fits(hello_of(features=endless), draft_node(FEATURES))
    assert len(caught.value.message) < 1000

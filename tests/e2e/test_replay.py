"""Receipts of real answers with drafts. A replay without drafts gives the same tokens."""

from __future__ import annotations

import json
import time

import pytest

from outrider.cli.main import main
from tests.e2e.random_requests import assert_exact

pytestmark = pytest.mark.real_model

WAIT_SECONDS = 60.0
PROMPT = "One two three four one two three four one two three"


@pytest.fixture(scope="module")
def receipts(real):
    """Returns receipts as JSON, by request id."""
    assert_exact(real)
    options = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.9, "top_p": 0.95, "n": 2, "seed": 5, "repetition_penalty": 1.1},
        "constrained": {"temperature": 1.0, "regex": "[0-9 ]{8,20}", "logit_bias": {50: 2.0}},
        "rejection": {"temperature": 1.0, "verification_method": "rejection"},
    }
    ids = {name: f"replay-{name}" for name in options}
    summaries = {
        name: real.client.complete(PROMPT, request_id=ids[name], max_tokens=24, **each).summary
        for name, each in options.items()
    }
    deadline = time.monotonic() + WAIT_SECONDS
    while not summaries["greedy"].metrics.speculation.num_accepted_draft_tokens:
        assert time.monotonic() < deadline, "the node has measured slow rows for too long"
        ids["greedy"] += "-again"
        again = real.client.complete(PROMPT, request_id=ids["greedy"], max_tokens=24, **options["greedy"])
        summaries["greedy"] = again.summary
    while True:
        lines = [json.loads(line) for path in real.receipts.glob("*") for line in path.read_bytes().splitlines()]
        found = {name: each for each in lines for name in options if each["request_id"] == ids[name]}
        if len(found) == len(options):
            return found
        assert time.monotonic() < deadline, found.keys()
        time.sleep(0.05)


@pytest.fixture
def replay(real, receipts, tmp_path, capsys):
    """replay(*receipts) replays a file with these receipts, and returns (exit status, output)."""

    def run(*chosen):
        path = tmp_path / "receipts.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in chosen))
        status = main(["replay", str(path), f"--against={real.router_address}"])
        return status, capsys.readouterr().out

    return run


def test_answers_with_drafts_are_computed_again_without_them_to_the_last_token(replay, receipts):
    status, shown = replay(receipts["greedy"], receipts["sampled"], receipts["constrained"])
    assert (status, shown.count(": identical: ")) == (0, 3), shown
    assert "replay-sampled: identical: " in shown
    status, shown = replay(receipts["rejection"])
    assert status == 3, shown


def test_a_receipt_with_another_token_or_seed_is_told_from_a_true_one(replay, receipts):
    changed = json.loads(json.dumps(receipts["sampled"]))
    token_ids = changed["samples"][1]["token_ids"]
    token_ids[7] += 1
    position = changed["samples"][1]["start_position"] + 7
    status, shown = replay(changed)
    assert (status, shown.count("  sample ")) == (1, 1), shown
    assert f"sample 1, position {position} (generated token 7): expected {token_ids[7]} " in shown
    assert f"computed {token_ids[7] - 1} " in shown
    assert "gap between the two best logprobs there: unknown" not in shown
    reseeded = json.loads(json.dumps(receipts["sampled"]))
    reseeded["request"]["sampling"]["seed"] = "6"
    status, shown = replay(reseeded)
    assert (status, shown.count("  sample ")) == (1, 2), shown

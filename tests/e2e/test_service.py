"""The public contract through four real processes, on a tiny model."""

from __future__ import annotations

import concurrent.futures
import random
import re
import threading
import urllib.request

import pytest

from outrider.client import ChatMessage, Client
from outrider.errors import AbortedError
from outrider.node import NodeRole
from outrider.request import FinishReason

WAIT_SECONDS = 60.0
LONG_PROMPT = [(i * 7) % 250 + 20 for i in range(120)]
# Only three ids can be drawn, so that the text repeats itself and n-gram drafts are accepted.
REPETITIVE = {"logit_bias": {30: 60.0, 31: 60.0, 32: 60.0}, "ignore_eos": True}

# Each token takes a step, so the number of steps tells whether an answer was stopped, however fast the machine is.
# Eight samples with logprobs make steps so long that even a late cancellation comes early in the answer.
UNTIL_STOPPED = {"max_tokens": 1900, "ignore_eos": True, "speculation": False, "n": 8, "seed": 4, "top_logprobs": 20}

PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.95, "seed": 6},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.4, "seed": 7, "min_tokens": 10},
    {"temperature": 0.9, "seed": 8, **REPETITIVE},
]


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_tokens_are_the_same_with_and_without_speculation(running, parameters):
    drafted, _ = running.generate(LONG_PROMPT, max_tokens=60, **parameters)
    plain, summary = running.generate(LONG_PROMPT, max_tokens=60, speculation=False, **parameters)
    assert drafted == plain
    assert summary.metrics.speculation.num_draft_tokens == 0


@pytest.mark.parametrize("method", ["rejection", "typical"])
def test_other_verification_methods_are_served(running, method):
    # The answer is so long that sources of drafts are tried again even if they were wrong in earlier tests. The request
    # is repeated, since beside busy tests the node may have measured that rows cost much.
    parameters = {"temperature": 0.9, "seed": 8, "max_tokens": 400, **REPETITIVE}
    num_accepted = num_answers = 0
    while not num_accepted and num_answers < 10:
        tokens, summary = running.generate(LONG_PROMPT, verification_method=method, **parameters)
        assert len(tokens) == 400
        assert set(tokens) <= {30, 31, 32}
        num_accepted += summary.metrics.speculation.num_accepted_draft_tokens
        num_answers += 1
    assert num_accepted > 0
    plain, _ = running.generate(LONG_PROMPT, verification_method=method, speculation=False, **parameters)
    coupled, _ = running.generate(LONG_PROMPT, **parameters)
    assert plain == coupled, "without drafts all methods are the same"


def test_drafts_are_accepted_where_the_text_repeats(running):
    """The number of drafts depends on the measured cost of rows, which a new node hardly knows."""
    answers = []
    num_steps = num_accepted = 0
    while num_accepted <= 3 * 20 and len(answers) < 10:  # beside busy tests the node may measure slow rows
        _, summary = running.generate(LONG_PROMPT, max_tokens=200, temperature=0.0, **REPETITIVE)
        answers.append(summary.metrics.speculation)
        num_steps += answers[-1].num_spec_steps
        num_accepted += answers[-1].num_accepted_draft_tokens
    assert num_accepted > max(3 * 20, num_steps // 2)
    for speculation in answers:
        assert sum(speculation.acceptance_histogram) == speculation.num_spec_steps
        accepted = sum(i * count for i, count in enumerate(speculation.acceptance_histogram))
        assert accepted == speculation.num_accepted_draft_tokens


def test_the_kv_of_a_long_prompt_is_moved_once_and_then_cached(running):
    prompt = [(i * 11) % 250 + 20 for i in range(200)]
    first, cold = running.generate(prompt, max_tokens=8, temperature=0.0)
    again, warm = running.generate(prompt, max_tokens=8, temperature=0.0)
    assert again == first
    assert cold.metrics.kv_transfer.connector == "shared_memory"
    assert cold.metrics.kv_transfer.bytes > 0
    assert cold.metrics.kv_transfer.exposed_seconds <= cold.metrics.kv_transfer.seconds
    assert (cold.usage.num_cached_tokens, warm.metrics.kv_transfer.connector) == (0, "")
    assert warm.usage.num_cached_tokens == 192
    assert [name.split("@")[0] for name in cold.metrics.nodes] == ["decode", "prefill"]


def test_sample_0_is_what_one_sample_gives_and_the_others_differ(running):
    alone, _ = running.generate(LONG_PROMPT, max_tokens=40, seed=9, ignore_eos=True)
    result = running.client.complete(LONG_PROMPT, max_tokens=40, seed=9, n=4, ignore_eos=True)
    samples = [completion.token_ids for completion in result.completions]
    assert samples[0] == alone
    assert len(set(samples)) == 4
    assert result.summary.usage.num_generated_tokens == 160


@pytest.mark.parametrize("num_brought", [1, 45])
def test_an_answer_goes_on_from_tokens_that_the_client_has(running, num_brought):
    parameters = {"max_tokens": 60, "seed": 4, "frequency_penalty": 0.5, "min_tokens": 20, "ignore_eos": True}
    whole, _ = running.generate(LONG_PROMPT, **parameters)
    rest, _ = running.generate(LONG_PROMPT, generated_token_ids=whole[:num_brought], **parameters)
    assert rest == whole[num_brought:]


def test_a_stop_token_inside_a_verified_block_is_the_last(running):
    plain, _ = running.generate(LONG_PROMPT, max_tokens=100, temperature=0.0, **REPETITIVE)
    stop = plain[-1]
    with running.client.generate(
        LONG_PROMPT, max_tokens=100, temperature=0.0, stop_token_ids=[stop], **REPETITIVE
    ) as stream:
        for _ in stream:
            pass
    assert stream.token_ids() == plain[: plain.index(stop) + 1]
    assert stream.finished[0].stop_token_id == stop


def test_a_stop_string_cuts_the_text_and_frees_the_sequence(running):
    result = running.client.complete("abc", max_tokens=80, seed=11, ignore_eos=True)
    words = re.findall(r"[a-z]{2,}", result.text)
    stop = words[len(words) // 2]
    cut = running.client.complete("abc", max_tokens=80, seed=11, ignore_eos=True, stop=[stop])
    assert cut.text == result.text[: result.text.index(stop)]
    assert (cut.completions[0].finished.reason, cut.completions[0].finished.stop_string) == (FinishReason.STOP, stop)
    running.wait_until_nothing_is_held()


def test_logprobs_and_echo(running):
    result = running.client.complete("hello", max_tokens=5, temperature=0.0, top_logprobs=3, echo=True)
    assert result.text.startswith("hello")
    logprobs = result.completions[0].logprobs
    assert [value.token_id for value in logprobs] == list(result.completions[0].token_ids)
    assert all(len(value.top) == 3 and value.logprob <= 0.0 for value in logprobs)


def test_chat_is_rendered_by_the_models_template(running):
    messages = [ChatMessage("user", "hello")]
    token_ids = running.client.tokenize(messages)
    assert "hello" in running.client.detokenize(token_ids)
    by_chat = running.client.complete(messages, max_tokens=10, seed=1)
    by_ids = running.client.complete(token_ids, max_tokens=10, seed=1)
    assert by_chat.text == by_ids.text


def test_abort_ends_the_stream_with_its_summary(running):
    with running.client.generate(LONG_PROMPT, request_id="doomed", **UNTIL_STOPPED) as stream:
        deltas = iter(stream)
        next(deltas)
        with running.held_steps():
            assert running.client.abort("doomed")
        for _ in deltas:
            pass
    assert {finished.reason for finished in stream.finished.values()} == {FinishReason.ABORTED}
    assert stream.summary.usage.num_generated_tokens == sum(
        len(stream.token_ids(sample)) for sample in range(UNTIL_STOPPED["n"])
    )
    assert not running.client.abort("doomed")
    running.wait_until_nothing_is_held()


def test_a_client_that_leaves_frees_everything_before_its_answer_would_have_ended(running):
    before = num_decode_steps(running)
    stream = running.client.generate(LONG_PROMPT[::-1], **UNTIL_STOPPED)
    deltas = iter(stream)
    next(deltas)
    stream.cancel()
    running.wait_until_nothing_is_held()
    assert 0 < num_decode_steps(running) - before < UNTIL_STOPPED["max_tokens"]


def num_decode_steps(running):
    """Returns the number of steps that the decode node has computed since its start."""
    (number,) = (node.step for node in running.status().nodes if node.role is NodeRole.DECODE)
    return number // 2


def test_the_model_says_who_it_is(running):
    model = running.client.model()
    assert (model.dtype, model.max_model_len, model.proposer, model.verification_method) == (
        "float32",
        2048,
        "ngram",
        "coupled",
    )
    assert model.num_speculative_tokens == 5
    assert re.fullmatch(r"[0-9a-f]{64}", model.fingerprint)


def metrics_of(node):
    with urllib.request.urlopen(f"http://{node.metrics_address}/metrics", timeout=WAIT_SECONDS) as page:
        return page.read().decode()


def test_each_node_exports_metrics_under_the_known_names(running):
    running.generate(LONG_PROMPT, max_tokens=20, **REPETITIVE)
    pages = {node.name: metrics_of(node) for node in running.cluster.nodes}
    for name in ("vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:spec_decode_num_drafts_total"):
        assert name in pages["decode-0"]
    for name in ("vllm:time_to_first_token_seconds_bucket", "vllm:request_success_total"):
        assert name in pages["router"]
    assert "vllm:prompt_tokens_total" in pages["prefill-0"]
    for name in ("prefill-0", "decode-0"):
        assert re.search(r'outrider:step_part_seconds_total\{[^}]*part="forward"\} \d', pages[name])
    assert 'model_name="' in pages["draft-0"]


def test_two_hundred_requests_with_random_aborts_leave_every_pool_whole(running):
    choice = random.Random(17)
    jobs = [
        {
            "prompt": [choice.randrange(5, 290) for _ in range(choice.choice((3, 40, 150, 300)))],
            "n": choice.choice((1, 1, 2)),
            "max_tokens": choice.choice((1, 20, 120)),
            "leave_after": choice.choice((None, None, 0, 1, 3)),
            "timeout_seconds": choice.choice((None, None, 0.3)),
        }
        for _ in range(200)
    ]
    outcomes = {"finished": 0, "left": 0, "late": 0}
    lock = threading.Lock()

    def run(job):
        outcome = "finished"
        with Client(running.router_address) as client:
            stream = client.generate(
                job["prompt"], n=job["n"], max_tokens=job["max_tokens"], seed=1, timeout_seconds=job["timeout_seconds"]
            )
            try:
                for index, _ in enumerate(stream):
                    if job["leave_after"] is not None and index >= job["leave_after"]:
                        stream.cancel()
                        outcome = "left"
                        break
            except AbortedError:
                outcome = "late"
        with lock:
            outcomes[outcome] += 1

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        for future in futures:
            future.result(timeout=4 * WAIT_SECONDS)
    assert sum(outcomes.values()) == 200
    assert outcomes["finished"] > 50
    assert outcomes["left"] > 10
    running.wait_until_nothing_is_held()

"""Prompt logprobs of a prefill node: they equal those of one pass over the prompt, whatever shares its steps."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention import make_attention_backend
from outrider.engine.engine import PromptEngine
from outrider.engine.kv_cache.make_pool import make_pool
from outrider.engine.model_runner import make_runner
from outrider.engine.pending import read
from outrider.engine.sampler.logprobs import pending_prompt_logprobs
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_profiler import StepProfiler
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.inbox import TransferInbox
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.prefill import MAX_SCORED_ROWS
from outrider.wire.answer import PackedLogprobs
from prefill_node.jobs import Stop
from prefill_node.prefill_loop import PrefillLoop
from tests.prefill_node.conftest import ADDRESS, job_of
from tests.support.cached_runner import CachedRunner
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.pool_integrity import check_pool
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import PATIENCE_SECONDS

BLOCK_SIZE = 16
NUM_BLOCKS = 128
MAX_ROWS = 2 * MAX_SCORED_ROWS
INCARNATION = bytes(16)
PROMPT = tuple(3 + (7 * n) % 290 for n in range(3 * MAX_SCORED_ROWS + 4))
NUM_TOP = 3


MODELS = {
    "native": {"dtype": "bfloat16"},
    "native layers": {"dtype": "bfloat16", "architecture": "gemma2"},
    "torch": {"dtype": "float32", "kernels": "torch"},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="bfloat16")


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def model(request, model_path, tmp_path_factory):
    """A model for each kind of runner."""
    config = dict(request.param)
    if architecture := config.pop("architecture", None):
        model_path = make_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="bfloat16", architecture=architecture)
    return load_model(ModelConfig(id=str(model_path), **config))


@dataclass(frozen=True)
class CountingEngine(PromptEngine):
    """An engine that records each step: (start, number of rows, number of logits) of each sequence."""

    steps: list

    def forward(self, block_copies, rows, **options):
        self.steps.append([(row.start_position, len(row.token_ids), row.num_logits) for row in rows])
        return PromptEngine.forward(self, block_copies, rows, **options)


class Node:
    """A prefill loop, which a test starts, and the decode node that it pushes to."""

    def __init__(self, model):
        self.cache = model.make_cache(NUM_BLOCKS, BLOCK_SIZE, [NUM_BLOCKS] * len(model.spec.layer_groups[1:]))
        self.runner = make_runner(model, self.cache, make_attention_backend("auto", model.device))
        self.decode_cache = model.make_cache(NUM_BLOCKS, BLOCK_SIZE)
        self.inbox = TransferInbox(incarnation=INCARNATION, on_complete=lambda *_: None, on_failed=lambda *_: None)
        self.pool = make_pool(self.cache, hash_seed=b"seed", max_step_tokens=MAX_ROWS)
        self.ended: queue.SimpleQueue = queue.SimpleQueue()
        self.steps = []
        scheduler = Scheduler(self.pool, max_running=4, max_rows_per_step=MAX_ROWS, reserve_blocks_per_running=0)
        engine = CountingEngine(self.pool, scheduler, self.cache, self.runner, steps=self.steps)
        self.loop = PrefillLoop(
            engine=engine,
            connector=InMemoryConnector({ADDRESS: self.inbox}),
            frame_bytes=8192,
            profiler=StepProfiler(engine.clock, self.runner.phases),
            emit=lambda ends, stats: [self.ended.put(end) for end in ends],
        )
        self.thread = threading.Thread(target=self.loop.run)
        self._ids = itertools.count()
        self._blocks = itertools.count()

    def submit(self, token_ids, scored_token_ids=()):
        transfer_id = os.urandom(16)
        where = {"transfer_id": transfer_id, "address": ADDRESS, "incarnation": INCARNATION}
        options = {"prompt_logprobs": NUM_TOP} if scored_token_ids else {}
        spec = TransferSpec(
            transfer_id=transfer_id,
            incarnation=INCARNATION,
            start_token=0,
            end_token=len(token_ids),
            planes=self.cache.planes,
        )
        blocks = [next(self._blocks) for _ in range(-(-len(token_ids) // BLOCK_SIZE))]
        self.inbox.open(spec, ReservedBlocks(self.decode_cache, blocks))
        job = job_of(next(self._ids), token_ids, **where, **options)
        job = replace(job, call=replace(job.call, scored_token_ids=tuple(scored_token_ids)))
        self.loop.submit(job)
        return job.job_id

    def run(self):
        """Starts the loop with the jobs submitted so far."""
        self.thread.start()
        return self

    def result(self):
        return self.ended.get(timeout=PATIENCE_SECONDS).result

    def stop(self):
        self.loop.submit(Stop())
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        check_pool(self.pool, [])


@pytest.fixture
def node(model):
    node = Node(model)
    yield node
    if node.thread.is_alive():
        node.stop()


def one_pass(model, token_ids, scored_token_ids):
    """Returns the logprobs of a single forward pass over the whole prompt."""
    node = CachedRunner(model, num_blocks=16, block_size=BLOCK_SIZE)
    logits = node.prefill(token_ids[: len(scored_token_ids)], range(16))
    return read(pending_prompt_logprobs(logits, scored_token_ids, NUM_TOP))[0]


def assert_alike(model, figures, expected):
    found = list(PackedLogprobs(figures.prompt_logprobs))
    assert [(entry.token_id, len(entry.top)) for entry in found] == [(entry.token_id, NUM_TOP) for entry in expected]
    for mine, theirs in zip(found, expected, strict=True):
        if model.info.numerics.startswith("exact ("):  # equal, except that logprobs are sent as float32
            assert mine.rank == theirs.rank
            assert [top_id for top_id, _ in mine.top] == [top_id for top_id, _ in theirs.top]
            tolerance = 1e-6
        else:
            tolerance = 1e-4
        assert mine.logprob == pytest.approx(theirs.logprob, rel=tolerance)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], rel=tolerance)


def test_chunks_and_company_change_nothing(model, node):
    node.submit(PROMPT[:-1], PROMPT[1:])
    assert node.loop.prompt_tokens.num_outstanding == MAX_SCORED_ROWS  # others wait for at most one step of it
    node.submit(PROMPT[::-1], ())
    node.submit(PROMPT[5:25], PROMPT[6:26])
    node.run()
    by_size = {}
    for _ in range(3):
        figures = node.result()
        by_size[figures.num_computed_tokens] = figures
    assert_alike(model, by_size[len(PROMPT) - 1], one_pass(model, PROMPT, PROMPT[1:]))
    assert_alike(model, by_size[20], one_pass(model, PROMPT[5:], PROMPT[6:26]))
    assert by_size[len(PROMPT)].prompt_logprobs == b""
    assert max(sum(num_logits for _, _, num_logits in step) for step in node.steps) <= MAX_SCORED_ROWS
    # The unscored prompt used the remaining rows of the first steps, and did not wait for the scored prompt.
    assert (0, MAX_ROWS - MAX_SCORED_ROWS, 0) in node.steps[0]


def test_what_is_cached_is_computed_again_and_serves_others(model, node):
    node.run()
    for _ in range(2):
        node.submit(PROMPT[:-1], PROMPT[1:])
        figures = node.result()
        assert (figures.num_cached_tokens, figures.num_computed_tokens) == (0, len(PROMPT) - 1)
        assert_alike(model, figures, one_pass(model, PROMPT, PROMPT[1:]))
    node.submit(PROMPT[:-1])
    assert node.result().num_cached_tokens == (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_of_a_continuation_the_prompt_alone_is_scored(model, node):
    node.run()
    node.submit(PROMPT, PROMPT[1:40])
    figures = node.result()
    assert figures.num_computed_tokens == len(PROMPT)
    assert_alike(model, figures, one_pass(model, PROMPT, PROMPT[1:40]))
    assert sum(num_logits for step in node.steps for _, _, num_logits in step) == 39


def test_they_are_those_of_transformers(model_path):
    model = load_model(ModelConfig(id=str(model_path), dtype="float32"))
    node = Node(model).run()
    node.submit(PROMPT[:-1], PROMPT[1:])
    found = PackedLogprobs(node.result().prompt_logprobs)
    node.stop()
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT])).logits[0, :-1]
    logprobs = logits.double().log_softmax(dim=1)
    for row, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(logprobs[row, PROMPT[row + 1]]), abs=1e-4)
        top = logprobs[row].topk(NUM_TOP).values.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top, abs=1e-4)

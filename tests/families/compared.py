"""Comparisons of one family's model: its logits with transformers', and answers of decode nodes with one another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from unittest import mock

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.kv_cache.base import slots_of
from outrider.engine.numerics import BatchInvariance, torch_batch_invariance
from outrider.kv_transfer.base import Region, TransferSpec
from outrider.model_hub.checkpoint import open_checkpoint
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.layerwise_reference import load_tensors
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.open import open_model
from outrider.model_hub.support import depends_on_batch
from outrider.request import LogprobsRequest, TokenLogprobs
from outrider.session import Granted, SampleStart, SampleTokens
from outrider.speculation.draft_tree import DraftTree
from tests.decode_node.tiny_node import TinyNode, generate
from tests.families.families import BY_LAYERS, DECODER, DEFAULT_NAME, FAMILIES, VOCAB_SIZE, Family
from tests.support.cached_runner import CachedRunner
from tests.support.fake_drafts import TextDrafts
from tests.support.in_memory_connector import InMemoryConnector

NUM_PROMPT = 90
"""Number of tokens of a random model's prompt: more than those that a sequence keeps of a sliding window."""
NUM_TOKENS = 64
"""Number of tokens of an answer."""
NUM_RECEIVED = 23
"""Number of tokens that a client has when its decode node is lost."""
PREFILL_BLOCK_SIZE = 8
"""Tokens in a block of the cache whose KV is handed off. The decode node's blocks are larger."""
TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nExplain in a few paragraphs how a bicycle stays upright.<|im_end|>\n<|im_start|>assistant\n"
)
EQUAL = "equal"
NOTES = ("lossy int8 weights and activations", "lossy int4 weights, int8 activations", "int8 activations")
"""What numerics say about quantised weights; the last one is a part of the one before."""


class Compared:
    """The model of one family. Everything is computed when it is first asked for, and only once."""

    def __init__(self, family: Family, directory: Path) -> None:
        """`directory`: an empty folder, for a random checkpoint."""
        self.family = family
        self._directory = directory
        self._made = family.make(directory) if family.model_type else None
        self.load, self.transformers = cache(self._load), cache(self._transformers)
        self.own_logits, self.our_logits = cache(self._own_logits), cache(self._our_logits)

    def _load(self, dtype: str) -> LoadedModel:
        """Opens the model as a node does, but in float32 with dequantised weights.

        Packed weights of real models are large, and kept in bfloat16 only: the default model's for all processes.
        """
        settings = {"dtype": dtype, "num_threads": 1, "head": "", **self.family.load}
        if self._made is not None:
            settings["id"] = str(self._made)
        if self.family is not FAMILIES[DEFAULT_NAME]:
            settings["cache_dir"] = str(self._directory / "cache")
        if dtype == "float32":
            settings["keep_packed"] = self._made is not None
            if self.family.is_quantised:
                settings["weights"] = "dequantized"
        return open_model(ModelConfig(**settings))

    @cached_property
    def served(self):
        """The model as it is compared with itself: in bfloat16, or in float32 if torch computes parts of it.

        Where torch computes, rows depend on the batch, in float32 by so little that it is seldom seen in tokens.
        """
        return self.load("float32" if self.family.torch_computes else "bfloat16")

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        if self._made is None:
            tokenizer = Tokenizer.from_file(str(self.load("bfloat16").directory / "tokenizer.json"))
            return tuple(tokenizer.encode(TEXT).ids)
        return tuple(random.Random(3).randrange(3, VOCAB_SIZE) for _ in range(NUM_PROMPT))

    @property
    def kernels(self) -> str:
        """What computes the model. A native decoder reads mapped weights, as in a node's later starts."""
        if not isinstance(self.served.native, NativeDecoder):
            assert "(by layers: " in str(self.served.kernels)
            return BY_LAYERS
        assert self.load("bfloat16").weights_source == "packed weights, mapped"
        return DECODER

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in bfloat16."""
        return self.load("bfloat16").spec.bytes_per_token

    @property
    def numerics(self) -> str:
        """The guarantee. Where torch computes, it is what loading finds on this machine."""
        guarantee, _, arithmetic = self.served.info.numerics.partition(" (")
        if not self.family.torch_computes:
            return ", ".join([guarantee, *(note for note in NOTES if note in arithmetic)][:2])
        depends = depends_on_batch(self.served)
        assert guarantee == (torch_batch_invariance("float32") if depends else BatchInvariance.EXACT)
        return "tested at load"

    def _transformers(self, dtype: str) -> PreTrainedModel:
        """Makes transformers' own model, of dequantised weights, with eager attention."""
        directory = self.load("bfloat16").directory
        about = {"dtype": getattr(torch, dtype), "attn_implementation": "eager", "local_files_only": True}
        checkpoint = open_checkpoint(directory, "cpu")
        if checkpoint is None:
            return AutoModelForCausalLM.from_pretrained(directory, **about).eval()
        config = AutoConfig.from_pretrained(directory)
        return load_tensors(config, checkpoint.tensors, dtype=about["dtype"], attention="eager").eval()

    def _own_logits(self, dtype: str) -> torch.Tensor:
        """Returns transformers' logits of the prompt and its own answer: [num_tokens, vocab_size] float32."""
        token_ids = torch.tensor([[*self.prompt, *self.answer]])
        with torch.inference_mode():
            return self.transformers(dtype)(token_ids, use_cache=False).logits[0].float()

    @cached_property
    def answer(self) -> list[int]:
        """The tokens that transformers generates after the prompt in float32, without an end of text."""
        model = self.transformers("float32")
        model.generation_config.eos_token_id = None
        prompt = torch.tensor([self.prompt])
        with torch.inference_mode():
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS
            )
        return tokens[0, len(self.prompt) :].tolist()

    def difference(self, logits: torch.Tensor) -> float:
        """Returns the largest difference from transformers' float32, relative to its largest logit."""
        expected = self.own_logits("float32")
        return float((logits - expected).abs().max() / expected.abs().max())

    def _our_logits(self, dtype: str) -> torch.Tensor:
        """Returns our logits of the same tokens."""
        runner = CachedRunner(self.load(dtype))
        token_ids = [*self.prompt, *self.answer]
        return runner.prefill(token_ids, runner.table(len(token_ids)), chunk=37)

    def greedy(self) -> str | int:
        """Compares a node's greedy answer in float32 with transformers'.

        If weights are rounded at load, returns the number of tokens of transformers' answer that have the largest logit
        after those before.
        """
        if self.family.rounds:
            preferred = self.our_logits("bfloat16")[len(self.prompt) - 1 : -1].argmax(-1)
            return int((preferred == torch.tensor(self.answer)).sum())
        with self.node(self.load("float32")) as node:
            tokens = generate(node, prompt=self.prompt)
        num_equal = next((i for i, (a, b) in enumerate(zip(tokens, self.answer, strict=True)) if a != b), NUM_TOKENS)
        return f"{num_equal} of {NUM_TOKENS}"

    @contextmanager
    def node(self, model, *, max_local_prefill_tokens: int = 999, **settings) -> Iterator[TinyNode]:
        """Yields a decode loop with an empty cache, which computes even long prompts itself."""
        with mock.patch("outrider.model_hub.compute.open_model", return_value=model):
            node = TinyNode(
                model.directory, max_local_prefill_tokens=max_local_prefill_tokens, draft_rows="all", **settings
            )
        node.max_tokens = NUM_TOKENS
        try:
            yield node
            node.assert_nothing_is_held()
        finally:
            node.close()

    @cached_property
    def plain(self) -> list[TokenLogprobs]:
        """A sampled answer, without drafts, hand-off and cached prefixes."""
        with self.node(self.served, num_speculative_tokens=0) as node:
            return self._answer(node, self.prompt)

    def drafts(self) -> str:
        """Compares an answer with drafts, which are trees with two right tokens and three wrong ones."""
        text = [*self.prompt, *_token_ids(self.plain)]
        with self.node(self.served) as node:
            node.loop._drafts._client = TextDrafts(partial(_tree, text))
            found = self._answer(node, self.prompt)
            assert node.num_accepted > NUM_TOKENS / 2
            assert node.num_drafted > 2 * node.num_accepted
        return self._outcome(found, self.plain)

    def hand_off(self) -> str:
        """Compares an answer after a prompt whose KV was computed in chunks in another cache, with other blocks."""
        source = CachedRunner(self.served, block_size=PREFILL_BLOCK_SIZE)
        table = source.table(len(self.prompt))
        source.prefill(self.prompt[:-1], table, chunk=11, num_logits=0)
        with self.node(self.served, max_local_prefill_tokens=1, num_speculative_tokens=0) as node:
            group_id = self._open(node, self.prompt)
            node.iterate()
            (granted,) = node.find(Granted, group_id)
            assert (granted.held_prefix_length, granted.num_tokens_to_compute) == (0, 1)
            push(source, table, node, granted, len(self.prompt) - 1)
            found = logprobs_of(node.run(), group_id)
            assert node.num_rows == NUM_TOKENS
        return self._outcome(found, self.plain)

    def prefix_hit(self) -> str:
        """Compares answers to a prompt that begins with an earlier prompt and its answer."""
        answer = _token_ids(self.plain)[:NUM_RECEIVED]
        prompt = (*self.prompt, *answer, *self.prompt[:5])
        with self.node(self.served, num_speculative_tokens=0) as node:
            spec = self.served.spec
            if not spec.windows and spec.linear is None:  # otherwise blocks and states are released meanwhile
                node.max_tokens = NUM_RECEIVED + 1  # no later token is in the second prompt
            self._answer(node, self.prompt)
            node.max_tokens = NUM_TOKENS
            group_id = self._open(node, prompt)
            found = logprobs_of(node.run(), group_id)
            assert node.find(Granted, group_id)[-1].held_prefix_length > len(self.prompt)
        with self.node(self.served, num_speculative_tokens=0) as node:
            return self._outcome(found, self._answer(node, prompt))

    def failover(self) -> str:
        """Compares an answer that a second node continues from the tokens that a client received."""
        received = self.plain[:NUM_RECEIVED]
        with self.node(self.served, num_speculative_tokens=0) as node:
            rest = self._answer(node, self.prompt, samples=(SampleStart(0, tuple(_token_ids(received))),))
        return self._outcome([*received, *rest], self.plain)

    def _answer(self, node: TinyNode, prompt: Sequence[int], **fields) -> list[TokenLogprobs]:
        group_id = self._open(node, prompt, **fields)
        return logprobs_of(node.run(), group_id)

    def _open(self, node: TinyNode, prompt: Sequence[int], **fields) -> bytes:
        logprobs = LogprobsRequest(num_top=2)
        return node.open(prompt=tuple(prompt), sampling={"temperature": 1.0}, logprobs=logprobs, **fields)

    def _outcome(self, found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> str:
        """Compares tokens and, if no part is computed by torch, the bits of their logprobs."""
        assert len(found) == len(expected) == NUM_TOKENS
        is_equal = _token_ids(found) == _token_ids(expected) if self.family.torch_computes else found == expected
        return EQUAL if is_equal else "different"


def logprobs_of(node: TinyNode, group_id: bytes) -> list[TokenLogprobs]:
    return [each for event in node.find(SampleTokens, group_id) for each in event.logprobs]


def _token_ids(logprobs: list[TokenLogprobs]) -> list[int]:
    return [each.token_id for each in logprobs]


def push(source: CachedRunner, table: list[int], node: TinyNode, granted: Granted, num_tokens: int) -> None:
    """Pushes a prompt's KV into the blocks that a node has granted, one layer and plane at a time."""
    planes = source.cache.planes
    spec = TransferSpec(
        transfer_id=granted.transfer_id,
        incarnation=node.parts.ingest.inbox.incarnation,
        start_token=granted.held_prefix_length,
        end_token=num_tokens,
        planes=planes,
    )
    sender = InMemoryConnector({granted.kv_address: node.parts.ingest.inbox}).connect(granted.kv_address, spec)
    slots = slots_of(table, num_tokens, source.block_size)
    for plane in planes:
        tokens = range(spec.first_token(plane), num_tokens)
        if plane.is_state:
            source.states.fill_slots(slots)  # the last plane
        for layer in range(plane.num_layers):
            layers = range(layer, layer + 1)
            region = Region(plane.name, layers, tokens, range(plane.num_heads))
            sender.put(region, source.cache.read(plane.name, layers, slots[tokens.start :]).data)
    sender.commit()


def _tree(text: list[int], known: list[int], num_wanted: int) -> DraftTree:
    """Returns a draft of two right tokens, each after a wrong sibling, and a wrong third one."""
    token_ids: list[int] = []
    parents: list[int] = []
    for place, right in enumerate(text[len(known) : len(known) + 3]):
        parent = len(token_ids) - 1
        wrong = (right + 1) % VOCAB_SIZE
        for token_id in (wrong, right)[: 2 - place // 2]:
            token_ids.append(token_id)
            parents.append(parent)
    return DraftTree(len(known), token_ids=tuple(token_ids[:num_wanted]), parents=tuple(parents[:num_wanted]))

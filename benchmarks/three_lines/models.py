"""A decode node and a drafter with real models, which may share processors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from decode_node.config import DecodeNodeConfig
from decode_node.drafting.feature_plane import FeaturePlane
from decode_node.drafting.local_proposers import open_local_head
from outrider.bench.prompts import BenchPrompt, load_prompts
from outrider.client import ChatMessage
from outrider.engine.engine import Engine
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.open_runner import open_runner
from outrider.engine.scheduler import Scheduler
from outrider.heads.of_target import TargetHead
from outrider.model_hub.checkpoint_text import read_text
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.open import open_model
from outrider.speculation.proposers.draft_model import MAX_FORWARD_LOGITS, MAX_FORWARD_ROWS
from outrider.speculation.proposers.factory import LOOKUP_NAMES, ProposerSettings, make_proposer, parse_draft_choice
from router.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from benchmarks.three_lines.speed_model import SpeedModel
    from decode_node.drafting.gather import FeaturesOf
    from outrider.engine.kv_cache.config import KVCacheConfig
    from outrider.model_hub.loaded_model import LoadedModel
    from outrider.node import FeatureFormat
    from outrider.speculation.proposers.base import Proposer

MAX_RUNNING = 64
MAX_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A target model and a draft node's proposer, which has a model of its own if it needs one."""

    model: LoadedModel
    reduction: FeatureSpec | None  # how a head's features are computed; None if the proposer is not a head
    proposer_name: str
    settings: ProposerSettings
    kv_cache: KVCacheConfig
    prompts_file: Path
    num_speculative_tokens: int = 5
    _token_ids: list[list[int]] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        config: ModelConfig,
        drafter: str,
        *,
        kv_cache: KVCacheConfig,
        prompts_file: Path,
        draft_cpus: Sequence[int],
    ) -> ModelPair:
        """Opens the target. `drafter`: as in `--draft`. Raises: the errors of `open_model`."""
        choice = parse_draft_choice(drafter)
        is_head = choice.proposer == "head"
        config = replace(config, head=choice.model_id if is_head else "")
        own = replace(config, cpus=tuple(draft_cpus))
        if choice.model_id and not is_head:
            own = replace(own, id=choice.model_id)
        model = open_model(config)
        reduction = TargetHead(config).reduction(model)
        return cls(
            model=model.with_features(reduction),
            reduction=reduction,
            proposer_name=choice.proposer,
            settings=ProposerSettings(model=own, kv_cache=kv_cache),
            kv_cache=kv_cache,
            prompts_file=prompts_file,
        )

    @property
    def description(self) -> str:
        drafter = self.proposer_name
        if drafter not in LOOKUP_NAMES:
            drafter += f":{self.settings.model.head or self.settings.model.id}"
        where = "processors of its own" if self.draft_cpus else "the target's processors"
        return (
            f"{self.model.info.name}, drafter {drafter} on {where}, at most {self.num_speculative_tokens} draft tokens"
        )

    @property
    def draft_cpus(self) -> Sequence[int]:
        return self.settings.model.cpus

    @property
    def takes_trees(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        return self.model.info.vocab_size

    @property
    def vocabulary_fingerprint(self) -> str:
        return self.model.info.vocabulary_fingerprint

    @property
    def max_model_len(self) -> int:
        return self.model.info.max_model_len

    def engine(self) -> Engine:
        cache, runner, _ = open_runner(
            self.model,
            "auto",
            self.kv_cache,
            num_rows=MAX_FORWARD_ROWS,
            num_logits=MAX_FORWARD_LOGITS,
            graphs=GraphShapes(has_trees=True) if self.settings.model.cuda_graphs else None,
            features=self.reduction,
        )
        pool = BlockPool(
            num_blocks=cache.num_blocks, block_size=cache.block_size, hash_seed=b"", enable_prefix_cache=False
        )
        scheduler = Scheduler(pool, max_running=MAX_RUNNING, max_rows_per_step=MAX_ROWS)
        return Engine(pool, scheduler, cache, runner, self.model.open_sampler())

    @property
    def features(self) -> FeatureFormat | None:
        return self.model.info.features

    def feature_plane(self, engine: Engine) -> FeaturePlane | None:
        plane = self.model.spec.features
        return None if plane is None else FeaturePlane(engine.kv_cache, plane)

    def drafter_beside(self, engine: Engine, *, temperature: float) -> tuple[Proposer, FeaturesOf | None]:
        if self.reduction is None:
            return make_proposer(self.proposer_name, self.settings), None
        config = DecodeNodeConfig(num_speculative_tokens=self.num_speculative_tokens)
        head, features_of = open_local_head(config, TargetHead(self.settings.model), self.model, engine.kv_cache)
        assert head is not None, "model.head names one"
        return head, features_of

    def drafter_arguments(self, *, temperature: float) -> Sequence[str]:
        settings = {
            "proposer": self.proposer_name,
            "look_ahead": "auto" if self.draft_cpus else "off",
            "model": asdict(self.settings.model),
            "kv_cache": asdict(self.settings.kv_cache),
        }
        return ("models", json.dumps(settings))

    def speed_model(self, measured: SpeedModel) -> SpeedModel:
        return measured

    def prompts(self, number: int, num_sequences: int) -> list[list[int]]:
        if not self._token_ids:
            self._token_ids.extend(_encoded(mixed(load_prompts(self.prompts_file)), self.model.tokenizer_files))
        first = (number + 1) * num_sequences
        return [self._token_ids[(first + place) % len(self._token_ids)] for place in range(num_sequences)]


def _encoded(prompts: Sequence[BenchPrompt], tokenizer_files: Mapping[str, bytes]) -> Iterator[list[int]]:
    """Encodes prompts as a router does: messages with the model's chat template, if it has one."""
    from tokenizers import Tokenizer

    checkpoint = read_text(tokenizer_files)
    tokenizer = Tokenizer.from_buffer(checkpoint.tokenizer_json)
    has_template = bool(checkpoint.chat_templates)
    template = ChatTemplate(checkpoint.chat_templates, checkpoint.special_tokens)
    for prompt in prompts:
        text = prompt.content
        if not isinstance(text, str):
            turns = [{"role": turn.role, "content": turn.content} for turn in text if isinstance(turn, ChatMessage)]
            text = "\n".join(turn["content"] for turn in turns)
            if has_template:
                text = template.render(turns, add_generation_prompt=True)
        yield tokenizer.encode(text, add_special_tokens=not has_template).ids


def mixed(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Returns the prompts with their kinds interleaved."""
    by_kind: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    longest = max(map(len, by_kind.values()))
    return [kind[place] for place in range(longest) for kind in by_kind.values() if place < len(kind)]

"""The forward passes of a loaded draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine.attention import make_attention_backend
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import ModelRunner, open_runner
from outrider.engine.pending import Pending
from outrider.engine.sampler import Sampler, SampleRows, SequenceSampling
from outrider.engine.sampler.warm_up import warm_up_sampler
from outrider.engine.step_graphs import GraphShapes
from outrider.engine.transfer import Arrays, read, upload_ids
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import attention_of
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.open import open_model
from outrider.model_hub.progress import Progress, no_progress
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.draft_forward import Decided, PathRows
from outrider.speculation.proposers.draft_model import MAX_FORWARD_LOGITS, MAX_FORWARD_ROWS, DraftModelProposer
from outrider.speculation.token_distribution import MAX_DISTRIBUTION_IDS, TokenDistribution


@dataclass(frozen=True, slots=True)
class ModelForward:
    """A `DraftForward`: runner, cache and sampler of one model."""

    pool: BlockPool
    kv_cache: PagedKVCache
    runner: ModelRunner
    sampler: Sampler
    max_model_len: int
    vocab_size: int

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        *,
        kv_cache: KVCacheConfig,
        attention: str = "auto",
        graphs: GraphShapes | None = None,
        main_memory_bytes: int = 0,
    ) -> ModelForward:
        """With a cache for this model alone. Raises ConfigError when the cache does not fit."""
        backend = make_attention_backend(attention, model.device, model.spec.dtype)
        cache, runner = open_runner(
            model,
            backend,
            kv_cache,
            num_rows=MAX_FORWARD_ROWS,
            num_logits=MAX_FORWARD_LOGITS,
            graphs=graphs,
            main_memory_bytes=main_memory_bytes,
        )
        pool = BlockPool(
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            hash_seed=model.info.fingerprint.encode(),
            enable_prefix_cache=kv_cache.prefix_cache,
        )
        sampler = Sampler(
            vocab_size=model.spec.vocab_size,
            known_token_ids=model.known_token_ids,
            device=model.device,
            kernels=model.cpu_kernels,
        )
        warm_up_sampler(sampler, model.device)
        return cls(pool, cache, runner, sampler, model.spec.max_model_len, model.spec.vocab_size)

    def start(self, start: SequenceStart, token_ids: Sequence[int]) -> SequenceSampling:
        params = start.options.sampling
        if start.wants_distributions:  # what is sent is what was drawn from
            params = replace(params, top_k=min(params.top_k or MAX_DISTRIBUTION_IDS, MAX_DISTRIBUTION_IDS))
        return self.sampler.start(
            params,
            sample=start.sample,
            prompt_token_ids=token_ids[: start.prompt_length],
            generated_token_ids=token_ids[start.prompt_length :],
            stop_token_ids=start.options.stop_token_ids,
        )

    def commit(self, sampling: object, token_ids: Sequence[int]) -> None:
        assert isinstance(sampling, SequenceSampling)
        self.sampler.commit(sampling, token_ids)

    @torch.inference_mode()
    def decide(self, rows: Sequence[PathRows], block_copies: Sequence[tuple[int, int]]) -> list[Decided]:
        if block_copies:
            self.kv_cache.copy_blocks(block_copies)
        fed = [
            SequenceRows(row.token_ids, row.start_position, row.block_ids, min(row.num_decisions, 1)) for row in rows
        ]
        logits = self.runner.forward(build_input_batch(fed, self.pool.block_size))
        deciding = [index for index, row in enumerate(rows) if row.num_decisions]
        distributions = self._distributions(logits, rows, deciding)
        rounds: list[tuple[list[int], Pending[list[int]]]] = []  # of each the rows, and what was decided after them
        while deciding:
            sampled = self.sampler.decide(logits, [_sample_rows(rows[index]) for index in deciding])
            rounds.append((deciding, Pending((sampled,), lambda arrays: arrays[0].tolist())))
            again = [place for place, index in enumerate(deciding) if rows[index].num_decisions > len(rounds)]
            if again:
                logits = _without(logits, again, sampled)
            deciding = [deciding[place] for place in again]
        found, *winners = read(distributions, *(pending for _, pending in rounds))
        decided: list[list[int]] = [[] for _ in rows]
        for (indices, _), token_ids in zip(rounds, winners, strict=True):
            for index, token_id in zip(indices, token_ids, strict=True):
                decided[index].append(token_id)
        return [Decided(tuple(token_ids), found.get(index)) for index, token_ids in enumerate(decided)]

    def _distributions(
        self, logits: Tensor, rows: Sequence[PathRows], deciding: Sequence[int]
    ) -> Pending[dict[int, TokenDistribution]]:
        """What the next token of some rows is drawn from, by row. `logits`: [len(deciding), vocab_size]."""
        places = [place for place, index in enumerate(deciding) if rows[index].wants_distribution]
        if not places:
            return Pending((), lambda _: {})
        asking = [deciding[place] for place in places]
        values = self.sampler.distribution(
            logits.index_select(0, upload_ids(places, logits.device)), [_sample_rows(rows[index]) for index in asking]
        )
        likely = values.topk(min(MAX_DISTRIBUTION_IDS, values.shape[1]), dim=1)
        probs = likely.values.softmax(dim=1)  # [len(places), 32] float32

        def finish(arrays: Arrays) -> dict[int, TokenDistribution]:
            found = {}
            for index, ids, weights in zip(asking, arrays[0].tolist(), arrays[1].tolist(), strict=True):
                kept = [(token_id, weight) for token_id, weight in zip(ids, weights, strict=True) if weight > 0.0]
                found[index] = TokenDistribution(tuple(token_id for token_id, _ in kept), tuple(w for _, w in kept))
            return found

        return Pending((likely.indices, probs.to(torch.float64)), finish)


def _sample_rows(row: PathRows) -> SampleRows:
    assert isinstance(row.sampling, SequenceSampling)
    position = row.start_position + len(row.token_ids)
    return SampleRows(row.sampling, position, draft_token_ids=(), assumed_token_ids=row.assumed_token_ids)


def _without(logits: Tensor, rows: Sequence[int], token_ids: Tensor) -> Tensor:
    """These rows, each without the token that has won: [num_rows, vocab_size] -> [len(rows), vocab_size].

    `token_ids`: [num_rows] int64, of all rows. Changes `logits` where they are all of them: nobody reads them again.
    """
    if len(rows) < len(logits):
        places = upload_ids(rows, logits.device)
        logits, token_ids = logits.index_select(0, places), token_ids.index_select(0, places)
    return logits.scatter_(1, token_ids.unsqueeze(1), -torch.inf)


def open_draft_model(
    config: ModelConfig, kv_cache: KVCacheConfig, *, main_memory_bytes: int = 0, progress: Progress = no_progress
) -> DraftModelProposer:
    """Loads the model. `main_memory_bytes`: what its cache leaves free for other things.

    Raises: what `open_model` and `ModelForward.of` raise.
    """
    model = open_model(config, progress=progress)
    forward = ModelForward.of(
        model,
        kv_cache=kv_cache,
        attention=attention_of(config, model.device),
        graphs=GraphShapes() if config.cuda_graphs else None,
        main_memory_bytes=main_memory_bytes,
    )
    return DraftModelProposer(
        forward,
        memory_bytes=forward.pool.num_blocks * forward.pool.block_size * model.spec.bytes_per_token,
        model_name=model.info.name,
        vocabulary_fingerprint=model.info.vocabulary_fingerprint,
        description={
            "dtype": model.info.dtype,
            "numerics": model.info.numerics,
            "kernels": str(model.kernels),
            "weights": model.weights_from,
            "threads": model.num_threads,
        },
    )

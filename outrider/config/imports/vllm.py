"""vLLM: the flags of `vllm serve`, its YAML and JSON files, and `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.config.imports.base import SPECULATIVE, Format, Imported, flattened, ignored, only
from outrider.config.imports.speculative import SpeculativeFormat

HEAD_METHODS = ("eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash")
MTP_METHODS = ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp")

SPECULATION = SpeculativeFormat(
    method="method",
    methods={
        **{name: name for name in ("ngram", "suffix", "draft_model")},
        **dict.fromkeys((*HEAD_METHODS, *MTP_METHODS), "head"),
        "ngram_gpu": "ngram",
    },
    model=("model",),
    count=("num_speculative_tokens",),
    of_target=("mtp", *MTP_METHODS),
    rules={
        "rejection_sample_method": only("standard", note="a request's verification_method decides; remove it"),
        "use_heterogeneous_vocab": only(False, note="draft model and target need the same vocabulary"),
        "quantization": only(note="draft models are computed in model.dtype; remove it"),
        "revision": only("main", note="download that revision and name its folder in model"),
        "draft_tensor_parallel_size": ignored("a draft model is computed by one process", 1),
        "parallel_drafting": ignored("the form of the head decides"),
        "prompt_lookup_max": ignored("n-grams are of 2 to 4 tokens, the longest match first"),
        "prompt_lookup_min": ignored("n-grams are of 2 to 4 tokens, the longest match first"),
        "max_model_len": ignored("drafts end at the target's window"),
        "disable_by_batch_size": ignored("drafts are verified where they make the batch faster"),
        "num_speculative_tokens_per_batch_size": ignored("drafts are verified where they make the batch faster"),
        "draft_sample_method": ignored("drafters run the target's own race (coupled verification)"),
        **dict.fromkeys(
            (
                *("enforce_eager", "moe_backend", "attention_backend", "kv_cache_dtype", "draft_load_config"),
                *("disable_padded_drafter_batch", "disable_logprobs", "disable_log_stats"),
                *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
                *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
            ),
            ignored("drafters have no such setting; tokens do not depend on it"),
        ),
    },
)


VLLM = Format(name="vllm", rules={}, speculative=SPECULATION.translate)


def speculative_settings(config: Mapping[str, Any] | None, *, target: str = "", source: str = "argument") -> Imported:
    """A `speculative_config` of vLLM in our settings: `.overrides` for a `Launch`, and `.warnings`.

    `target`: the served model, which MTP heads come with. None as a config is no speculation.

    Raises: ConfigError, naming the key, for what cannot be honoured.
    """
    return Imported(outcomes=VLLM.translate(flattened(config, source, SPECULATIVE), target=target))

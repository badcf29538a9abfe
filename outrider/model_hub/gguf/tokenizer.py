"""A GGUF file's vocabulary as a tokenizer.json, and its other text settings.

Texts get the same token ids as from llama.cpp with special tokens parsed, as far as `tokenizers` can express them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import TEMPLATE_FOLDER
from outrider.model_hub.gguf.pre_tokenizers import pre_tokenization

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""GGUF's numbers of token types that are matched in texts before anything else."""
_SPACE = "▁"
_MAX_TOKEN_LENGTH = 1000
"""Maximum characters of a token. The time to find its merges grows with the square."""
_SENTENCE_PIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids that hold for SentencePiece vocabularies unless the metadata has others."""
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<eos>", "[EOS]", "[EOT]"),
        *("<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"),
    )
)
"""Tokens that end a text in llama.cpp by their name alone, whatever their type."""
_NAMED_TEMPLATE = re.compile(r"tokenizer\.chat_template\.(?P<name>[\w-]+)")
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class GgufVocabulary:
    """The metadata of a tokenizer."""

    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> GgufVocabulary:
        """Raises: ModelError if the kind of tokenizer is not supported."""
        kind = metadata.get("tokenizer.ggml.model")
        if kind not in ("llama", "gpt2"):
            raise ModelError(
                f"the GGUF file's tokenizer is of kind {kind!r}, which is not supported: only 'llama' (SentencePiece) "
                "and 'gpt2' (byte-level BPE) are"
            )
        if "tokenizer.ggml.tokens" not in metadata:
            raise ModelError("the GGUF file has no vocabulary: convert the model again")
        return cls(metadata)

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    @property
    def is_byte_level(self) -> bool:
        return bool(self.get("model") == "gpt2")

    @cached_property
    def tokens(self) -> list[str]:
        return [token or f"[EMPTY_{index}]" for index, token in enumerate(self.get("tokens"))]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    @property
    def types(self) -> list[int]:
        found: list[int] = self.get("token_type") or [1] * len(self.tokens)
        return found

    def special_id(self, name: str) -> int | None:
        """Returns the id of a special token: bos, eos, unknown, padding, eot or eom."""
        default = None if self.is_byte_level else _SENTENCE_PIECE_IDS.get(name)
        token_id = self.get(f"{name}_token_id", default)
        return int(token_id) if token_id is not None and 0 <= token_id < len(self.tokens) else None

    def make_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises: ModelError if the metadata is incomplete or not supported."""
        tokenizer = self._byte_level() if self.is_byte_level else self._sentence_piece()
        is_phi3 = any(name in str(self.metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
        special, plain = [], []
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in (_UNKNOWN, _CONTROL) or token in _ENDS:
                strips = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
                special.append(AddedToken(token, normalized=False, rstrip=strips))
            elif kind == _USER_DEFINED:
                plain.append(AddedToken(token, normalized=False, special=False))
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)
        before, after = self._special_around()
        if before or after:
            around = [*before, "$A", *after]
            tokens = [(token, self.ids[token]) for token in dict.fromkeys((*before, *after))]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=around, pair=[*around, *(f"{part}:1" for part in (*before, "$B", *after))], special_tokens=tokens
            )
        return tokenizer

    def _special_around(self) -> tuple[list[str], list[str]]:
        """Returns the tokens that are added before and after each text. Raises: ModelError if they are unknown."""
        adds = pre_tokenization(self.get("pre", "default")).adds_bos if self.is_byte_level else True
        found = []
        for name, default in (("bos", adds), ("eos", False)):
            is_added, token_id = self.get(f"add_{name}_token", default), self.special_id(name)
            if is_added and token_id is None:
                raise ModelError(f"the GGUF file's tokenizer adds a token {name} that the file does not name")
            found.append([self.tokens[token_id]] if is_added and token_id is not None else [])
        return found[0], found[1]

    def _byte_level(self) -> Tokenizer:
        kind = pre_tokenization(self.get("pre", "default"))
        pairs = ((merge, merge.index(" ", 1)) for merge in self.get("merges", ()))
        merges = [(merge[:at], merge[at + 1 :]) for merge, at in pairs]
        tokenizer = Tokenizer(models.BPE(vocab=self.ids, merges=merges, ignore_merges=kind.ignores_merges))
        tokenizer.pre_tokenizer = kind.make()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentence_piece(self) -> Tokenizer:
        """Makes SentencePiece's BPE, which joins the two neighbours whose joined token has the highest score."""
        merges = _sentence_piece_merges(dict(zip(self.tokens, self.get("scores"), strict=True)))
        unknown = self.special_id("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self.ids,
                merges=merges,
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        has_prefix = self.get("add_space_prefix", True)
        prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer

    def eos_ids(self) -> list[int]:
        """Returns the ids of tokens that end a text or a turn, ascending."""
        named = {self.special_id(name) for name in ("eos", "eot", "eom")} - {None}
        found = named | {self.ids[token] for token in _ENDS & self.ids.keys()}
        if "<|end|>" in self.ids and {"<|return|>", "<|call|>"} <= self.ids.keys():
            found -= {self.ids["<|end|>"]}  # ends a part of an answer
        return sorted(token_id for token_id in found if token_id is not None)

    def text_files(self) -> dict[str, Any]:
        """Returns the files besides tokenizer.json by path: texts, or objects to be written as JSON."""
        special = {name: self.special_id(key) for name, key in _SPECIAL_TOKENS.items()}
        named = {name: self.tokens[token_id] for name, token_id in special.items() if token_id is not None}
        generation: dict[str, Any] = {
            f"{name}_id": special[name] for name in ("bos_token", "pad_token") if special[name] is not None
        }
        generation["eos_token_id"] = self.eos_ids()
        for name, parameter in _SAMPLING.items():
            if (value := self.metadata.get(f"general.sampling.{name}")) is not None:
                generation[parameter] = value
        files: dict[str, Any] = {
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named},
            "generation_config.json": generation,
        }
        for key, template in self.metadata.items():
            if key == "tokenizer.chat_template":
                files["chat_template.jinja"] = template
            elif named_template := _NAMED_TEMPLATE.fullmatch(key):
                files[f"{TEMPLATE_FOLDER}/{named_template['name']}.jinja"] = template
        return files


def _sentence_piece_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the last merge that makes each token, best score first. `scores`: by token.

    A text's characters become a token only if none of them is merged with a neighbour outside it. So the merges that
    make the token are the same in every text, and other ways to divide it need no merge.
    """
    found = []
    for token, score in scores.items():
        if len(token) > _MAX_TOKEN_LENGTH:
            raise ModelError(f"the GGUF file's tokenizer has a token of {len(token):,} characters")
        parts = list(token)
        while len(parts) > 2:
            joined = [scores.get(left + right, -math.inf) for left, right in pairwise(parts)]
            at = joined.index(max(joined))  # of equal scores, the first
            if joined[at] == -math.inf:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2 and " " not in token and all(part in scores for part in parts):  # spaces are escaped
            found.append((score, parts[0], parts[1]))
    found.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in found]

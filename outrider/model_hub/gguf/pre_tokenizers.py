"""How texts are split into words before byte-level BPE, by GGUF's `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from outrider.errors import ModelError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}" for upper, lower in ("*+", "+*")]
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{'|'.join(_CASED)}|\p{{N}}|{_OTHERS}"
_GPT4O = rf"{'|'.join(f'{cased}{_CONTRACTION}?' for cased in _CASED)}|\p{{N}}{{1,3}}|{_OTHERS}"
_ASCII_SYMBOLS = r"""!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    rf"[{_ASCII_SYMBOLS}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """One value of `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]  # each splits what the earlier ones left; matches and what is between them are words
    ignores_merges: bool = False  # whether a word that is a token is never divided
    adds_bos: bool = False  # unless the metadata says otherwise

    def make(self) -> pre_tokenizers.PreTokenizer:
        """Returns the pre-tokenizer, which also maps bytes to characters."""
        *steps, last = self.patterns
        has_own = last == _GPT2  # ByteLevel has this pattern itself
        parts = [_split(pattern) for pattern in (steps if has_own else self.patterns)]
        return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_own)])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == _DIGIT:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_KINDS = {
    "default": PreTokenization(_DEFAULT),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": PreTokenization((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenization((_DIGIT, _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenization(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenization((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2": PreTokenization((_QWEN2,)),
    "qwen35": PreTokenization((_QWEN35,)),
    "tekken": PreTokenization((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenization((_GPT4O,)),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenization(_DEEPSEEK3),
    "deepseek-coder": PreTokenization(_DEEPSEEK_CODER),
}
"""Names separated by spaces, as several models may split texts in the same way."""
PRE_TOKENIZATIONS = {name: kind for names, kind in _KINDS.items() for name in names.split()}


def pre_tokenization(name: str) -> PreTokenization:
    """Returns the rules of a `tokenizer.ggml.pre`. Raises: ModelError if it is unknown."""
    if name not in PRE_TOKENIZATIONS:
        raise ModelError(
            f"the GGUF file splits texts by {name!r}, which is not supported: use a model that splits them by one "
            f"of {', '.join(PRE_TOKENIZATIONS)}"
        )
    return PRE_TOKENIZATIONS[name]

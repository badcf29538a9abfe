"""From another server's speculative decoding to ours: who proposes, with which model, how many tokens."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config.imports.base import SPECULATIVE, ForeignKey, Kind

OFF = {"cluster.draft": "none", "decode_node.num_speculative_tokens": 0, "model.head": ""}
COUNTS = ("decode_node.num_speculative_tokens", "draft_node.num_speculative_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The keys of a format's `speculative_config`, by what they mean."""

    method: str  # names the method
    methods: Mapping[str, Sequence[str]]  # by our proposer; case is ignored
    model: Sequence[str]  # name the draft model, or the head
    count: Sequence[str]  # name the number of draft tokens
    of_target: Sequence[str]  # methods whose head may come with the served model

    def translate(
        self, keys: Sequence[ForeignKey], target: str, by_rule: Callable[[ForeignKey], ForeignKey]
    ) -> list[ForeignKey]:
        """`keys`: those of the group, at least one. `target`: the served model; empty: unknown."""
        by_name = {key.key.removeprefix(f"{SPECULATIVE}."): key for key in keys}
        given = {name: key for name, key in by_name.items() if key.value is not None}
        method, model = given.get(self.method), next((name for name in self.model if name in given), None)
        try:
            chosen = self._choose(str(method.value) if method else "", str(given[model].value) if model else "", target)
        except ValueError as error:
            others = [by_rule(key) for key in keys if key is not method]
            wrong = [key for key in others if key.kind is Kind.ERROR]
            return [(method or keys[0]).became(Kind.ERROR, str(error)), *wrong]
        meanings = {name: dict.fromkeys(COUNTS, given[name].value) for name in self.count if name in given}
        if model:  # the model's name says which, the method's all the rest
            meanings[model] = {
                name: chosen.pop(name) for name in ("model.head", "draft_node.model") if chosen.get(name)
            }
        meanings[self.method] = chosen
        return [
            key.became(Kind.SET, "", meanings[name]) if name in given and meanings.get(name) else by_rule(key)
            for name, key in by_name.items()
        ]

    def _choose(self, method: str, model: str, target: str) -> dict[str, Any]:
        """The settings of a method, whose model may be empty. Raises: ValueError."""
        known = {name.lower(): proposer for proposer, names in self.methods.items() for name in names}
        proposer = known.get(method.lower())
        if proposer is None:
            names = [name for names in self.methods.values() for name in names]
            asked = f"{method} is none of" if method else f"{self.method} is missing: name one of"
            nearest = difflib.get_close_matches(method, names, n=1, cutoff=0.0)[0]
            raise ValueError(f"{asked} {', '.join(names)}" + (f"; the nearest is {nearest}" if method else ""))
        settings: dict[str, Any] = {"cluster.draft": proposer, "draft_node.proposer": proposer, "model.head": ""}
        if proposer not in ("draft_model", "head"):
            return settings | {"decode_node.local_fallback": proposer}
        if not model and method in self.of_target:
            model = target
        if not model:
            wanted = "a model" if proposer == "draft_model" else "the folder of a head"
            wanted += " (or the served model's own folder, as model)" if method in self.of_target else ""
            raise ValueError(f"{method} needs {self.model[0]}, {wanted}")
        if proposer == "head":
            folder = Path(model).expanduser().absolute()
            if not folder.is_dir():
                raise ValueError(f"{model} is no folder: download the head, and name its folder in {self.model[0]}")
            model = str(folder)
            settings |= {"model.head": model, "decode_node.local_head": True, "cluster.draft_nodes": 0}
        settings |= {"decode_node.local_fallback": "none", "cluster.draft": f"{proposer}:{model}"}
        return settings | {"draft_node.model": model}

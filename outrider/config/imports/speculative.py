"""From another server's speculative decoding to ours: who proposes, with which model, how many tokens."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config.imports.base import Entry, Kind, Outcome, Rule, apply_rules

LOOKUPS = ("ngram", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeFormat:
    """The keys of a format's `speculative_config`, by what they mean."""

    method: str  # names the method
    methods: Mapping[str, str]  # to our proposer, by name; case is ignored
    model: tuple[str, ...]  # names the draft model or head
    count: tuple[str, ...]  # names the number of draft tokens
    of_target: tuple[str, ...] = ()  # methods whose head may come with the served model
    rules: Mapping[str, Rule]  # of all other keys

    def translate(self, entries: Sequence[Entry], target: str) -> list[Outcome]:
        """`entries`: those of the group, at least one. `target`: the served model; empty: unknown."""
        by_name = {entry.key.rpartition(".")[2]: entry for entry in entries if entry.value is not None}
        method = by_name.get(self.method)
        if method is None:
            missing = f"{self.method} is missing: name one of {', '.join(self.methods)}"
            return [Outcome(entry=entries[0], kind=Kind.ERROR, note=missing)]
        model = next((by_name[name] for name in self.model if name in by_name), None)
        proposer = {name.lower(): proposer for name, proposer in self.methods.items()}.get(str(method.value).lower())
        outcomes = [self._of_method(method, proposer, model, target)]
        for entry in entries:
            name = entry.key.rpartition(".")[2]
            if entry is method:
                continue
            if name in self.model and entry.value is not None:
                outcomes.append(_of_model(entry, proposer))
            elif name in self.count and entry.value is not None:
                settings = dict.fromkeys(
                    ("decode_node.num_speculative_tokens", "draft_node.num_speculative_tokens"), entry.value
                )
                outcomes.append(Outcome(entry=entry, kind=Kind.SET, settings=settings))
            else:
                known = dict.fromkeys((self.method, *self.model, *self.count), Rule()) | dict(self.rules)
                outcomes.append(apply_rules({f"speculative_config.{key}": rule for key, rule in known.items()}, entry))
        return outcomes

    def _of_method(self, method: Entry, proposer: str | None, model: Entry | None, target: str) -> Outcome:
        """What the method alone decides; the draft model's own settings are its entry's."""
        if proposer is None:
            nearest = difflib.get_close_matches(str(method.value), self.methods, n=1, cutoff=0.0)[0]
            note = f"{method.value} is none of {', '.join(self.methods)}; the nearest is {nearest}"
            return Outcome(entry=method, kind=Kind.ERROR, note=note)
        settings: dict[str, Any] = {"draft_node.proposer": proposer}
        if proposer in LOOKUPS:
            settings |= {"cluster.draft": proposer, "decode_node.local_fallback": proposer, "model.head": ""}
            return Outcome(entry=method, kind=Kind.SET, settings=settings)
        settings["decode_node.local_fallback"] = "none"
        is_of_target = model is None and str(method.value).lower() in self.of_target
        name = target if is_of_target else "" if model is None else str(model.value)
        if not name:
            note = (
                f"{method.value} needs {self.model[0]}: the {'folder of the head' if proposer == 'head' else 'model'}"
            )
            return Outcome(entry=method, kind=Kind.ERROR, note=note)
        if proposer == "draft_model":
            return Outcome(
                entry=method,
                kind=Kind.SET,
                settings=settings | {"cluster.draft": f"{proposer}:{name}", "model.head": ""},
            )
        settings |= {
            "cluster.draft": f"head:{_absolute(name)}",
            "cluster.draft_nodes": 0,
            "decode_node.local_head": True,
        }
        if is_of_target:
            settings |= dict.fromkeys(("model.head", "draft_node.model"), _absolute(name))
            if not Path(name).expanduser().is_dir():
                return Outcome(entry=method, kind=Kind.ERROR, note=f"the model {name} is no folder: {_NEEDS_FOLDER}")
        return Outcome(entry=method, kind=Kind.SET, settings=settings, note="decode nodes propose with the head")


_NEEDS_FOLDER = "download the head, and name its folder"


def _of_model(entry: Entry, proposer: str | None) -> Outcome:
    """What the draft model's name sets."""
    name = str(entry.value)
    if proposer == "draft_model":
        return Outcome(entry=entry, kind=Kind.SET, settings={"draft_node.model": name})
    if proposer != "head":
        return Outcome(entry=entry, kind=Kind.WARNING, note="this method has no model")
    if not Path(name).expanduser().is_dir():
        return Outcome(entry=entry, kind=Kind.ERROR, note=f"{name} is no folder: {_NEEDS_FOLDER}")
    settings = dict.fromkeys(("model.head", "draft_node.model"), _absolute(name))
    return Outcome(entry=entry, kind=Kind.SET, settings=settings)


def _absolute(folder: str) -> str:
    return str(Path(folder).expanduser().absolute())

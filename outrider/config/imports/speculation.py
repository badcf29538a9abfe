"""From another server's speculative decoding to ours: who drafts, and with which model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config.imports.translated import SPECULATIVE, Kind, Translated
from outrider.config.yaml_files import Entry

OFF = {"cluster.draft": "none", "decode_node.num_speculative_tokens": 0, "model.head": ""}


def speculation(flat: Mapping[str, Entry], target: str, names: Mapping[str, Any]) -> dict[str, Translated]:
    """What becomes of the keys that name the method and its model, by key; all others have rules.

    Args:
        flat: all entries by key.
        target: the served model; empty: unknown.
        names: `speculative` of `keys.yaml`.
    """
    whole = flat.get(SPECULATIVE)
    if whole is not None and not whole.value:
        return {SPECULATIVE: Translated(entry=whole, kind=Kind.SET, settings=OFF)}
    group = {key.partition(".")[2]: entry for key, entry in flat.items() if key.startswith(f"{SPECULATIVE}.")}
    if not group:
        return {}
    given = {name: str(entry.value) for name, entry in group.items() if entry.value is not None}
    by = next((name for name in names["models"] if name in given), "")
    of_model = next((name for name in names["models"].get(by, ()) if name in given), "")
    method = group[by] if by else next(iter(group.values()))
    try:
        settings = _settings(given.get(by, ""), given.get(of_model, ""), by, target, names)
    except ValueError as error:
        return {method.key: Translated(entry=method, kind=Kind.ERROR, note=str(error))}
    found = {}
    if of_model and "draft_node.model" in settings:  # the model's key says which, the method's all the rest
        own = {name: settings.pop(name) for name in ("model.head", "draft_node.model") if settings[name]}
        found[group[of_model].key] = Translated(entry=group[of_model], kind=Kind.SET, settings=own)
    return {**found, method.key: Translated(entry=method, kind=Kind.SET, settings=settings)}


def _settings(method: str, model: str, by: str, target: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Of a method, which the key `by` names, and whose model may be empty. Raises: ValueError."""
    proposers: Mapping[str, str] = names["methods"]
    if not method:
        raise ValueError(f"{' or '.join(names['models'])} is missing: name one of {', '.join(proposers)}")
    proposer = proposers.get(method.lower())
    if proposer is None:
        (nearest,) = difflib.get_close_matches(method.lower(), proposers, n=1, cutoff=0.0)
        raise ValueError(f"{method} is none of {', '.join(proposers)}; the nearest is {nearest}")
    settings: dict[str, Any] = {"cluster.draft": proposer, "draft_node.proposer": proposer, "model.head": ""}
    if proposer not in ("draft_model", "head"):
        return {**settings, "decode_node.local_fallback": proposer}
    may_be_target = method.lower() in names["of_target"]
    model = model or (target if may_be_target else "")
    if not model:
        wanted = "a model" if proposer == "draft_model" else "the folder of a head"
        wanted += " (or the served model's own folder, as model)" if may_be_target else ""
        raise ValueError(f"{method} needs {names['models'][by][0]}, {wanted}")
    if proposer == "head":
        folder = Path(model).expanduser().absolute()
        if not folder.is_dir():
            raise ValueError(
                f"{model} is no folder: download the head, and name its folder in {names['models'][by][0]}"
            )
        model = str(folder)
        settings |= {"model.head": model, "decode_node.local_head": True, "cluster.draft_nodes": 0}
    return {
        **settings,
        "cluster.draft": f"{proposer}:{model}",
        "draft_node.model": model,
        "decode_node.local_fallback": "none",
    }

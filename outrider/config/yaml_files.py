"""Reads YAML files, and so JSON files too, as entries with line numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError

if TYPE_CHECKING:  # clients have settings (TLS) but read no files, so yaml is imported only where files are read
    import yaml

NULL, MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
BLANK = re.compile(r"\$\{\w+(:?[-+?][^}]*)?\}|\$\(\w+\)|^\$\w+(?=[/:]|$)|\{\{[^}]*(?<![\w)\]])\.[a-zA-Z }]")
"""Placeholders of a shell, Kubernetes or Helm: ${NAME:-x}, $(NAME), $NAME and {{ .Values.name }}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value and its source. Keys in groups are flattened: `kv_cache.memory`."""

    key: str
    value: Any  # as in the source; None for a group whose entries follow
    source: str  # "outrider.yaml:3", "--set kv_cache.memory=1GiB"
    is_group: bool = False  # its entries follow
    text: str | None = None  # how a file spells a single value, such as 0123 or 1.10; otherwise None


def read_entries(path: Path) -> list[Entry]:
    """Returns entries in file order, as PyYAML reads them. Raises: ConfigError, with the line of invalid YAML."""
    import yaml

    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        if re.match(r"\ufeff?\s*[{\[]", text):  # JSON, unlike YAML, allows tabs outside strings
            text = re.sub(r'"(?:\\.|[^"\\])*"|\t', lambda found: found[0] if found[0] != "\t" else " ", text)
        loader = yaml.SafeLoader(text)
        try:
            nodes: list[yaml.Node] = []
            while loader.check_node():
                node = loader.get_node()
                if node is not None and node.tag != NULL:  # documents before and after a `---` may be empty
                    nodes.append(node)
            if nodes[1:]:
                raise ConfigError(f"{path}:{nodes[1].start_mark.line + 1}: a second document begins: keep one")
            return [entry for node in nodes for entry in _entries(loader, node, path, "", (), {})]
        finally:
            loader.dispose()
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        line = "" if mark is None else "".join(text.splitlines()[mark.line : mark.line + 1])
        raise ConfigError(f"{where}: not YAML: {problem}{_advice(line)}") from error


def _advice(line: str) -> str:
    """Advises how to fix a line that is not YAML, if the cause is a common one."""
    if "{{" in line or "{%" in line:
        return "; render a template first, by helm template for example"
    if "\t" in line:
        return "; use spaces, not tabs"
    if re.search(r"\[[0-9a-fA-F:.%]+\]:", line):
        return '; put an IPv6 address in quotes: "[::1]:50051"'
    return ""


def _entries(
    loader: yaml.SafeLoader,
    node: yaml.Node,
    path: Path,
    prefix: str,
    outer: Sequence[yaml.Node],
    lines: dict[str, int],
) -> Iterator[Entry]:
    """Yields the entries of a mapping and of the groups in it, with `prefix` before each key.

    `outer`: the nodes around this one. `lines`: line numbers of all earlier keys by full name, since `a.b` may be one
    key or key `b` of group `a`. Raises: ConfigError.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: settings are needed, each as NAME: VALUE")
    _merge(loader, node)
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):  # for example {{ .Values.name }}
            raise ConfigError(f"{path}:{line}: a group or list cannot be a key; render a template first")
        key = prefix + key_node.value
        if not prefix and key.startswith(("x-", ".")):  # Compose and others keep aliased fragments in such keys
            continue
        source, same = f"{path}:{line}", key.replace("-", "_")  # other servers' files use dashes
        if same in lines:
            raise ConfigError(f"{source}: {key} is already set in line {lines[same]}")
        lines[same] = line
        if not isinstance(value_node, yaml.MappingNode) or not value_node.value:
            try:
                value = loader.construct_object(value_node, deep=True)
            except ValueError as error:  # for example an impossible date
                raise ConfigError(f"{source}: {key} is not a value: {error}") from error
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, str) and BLANK.search(part):
                    raise ConfigError(f"{source}: {key} = {part} must be filled in first, for example by envsubst")
            text = value_node.value if isinstance(value_node, yaml.ScalarNode) else None
            yield Entry(key=key, value=value, source=source, text=text)
            continue
        if value_node in (*outer, node):  # through an alias
            raise ConfigError(f"{source}: {key} contains itself")
        yield Entry(key=key, value=None, source=source, is_group=True)
        yield from _entries(loader, value_node, path, f"{key}.", (*outer, node), lines)


def _merge(loader: yaml.SafeLoader, node: yaml.MappingNode) -> None:
    """Replaces `<<` with the keys that it merges. The group's own keys override them."""
    num_own = sum(key_node.tag != MERGE for key_node, _ in node.value)
    if num_own == len(node.value):
        return
    loader.flatten_mapping(node)  # puts the merged keys before the group's own; of equal merged keys the last counts
    first = len(node.value) - num_own
    brought = {str(loader.construct_object(pair[0], deep=True)): pair for pair in node.value[:first]}
    for key_node, _ in node.value[first:]:
        brought.pop(str(loader.construct_object(key_node, deep=True)), None)
    node.value = [*brought.values(), *node.value[first:]]

"""Reads YAML files as entries that know their lines. JSON is YAML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError

if TYPE_CHECKING:  # a client has settings (TLS) and reads none: only what reads a file imports yaml
    import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value, where it was set. Keys of groups are flattened: `kv_cache.memory`."""

    key: str
    value: Any  # as the source has it; None of a group whose entries follow
    source: str  # "outrider.yaml:3", "--set kv_cache.memory=1GiB"
    is_group: bool = False  # whose entries follow


def read_entries(path: Path) -> list[Entry]:
    """In their order. Raises: ConfigError, with the line, for a file that cannot be read."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        # JSON may be indented by tabs, and has none elsewhere.
        loader = yaml.SafeLoader(text.replace("\t", " ") if path.suffix == ".json" else text)
        try:
            node = loader.get_single_node()
            return [] if node is None else list(_entries(loader, node, path, "", (), {}))
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
        raise ConfigError(f"{where}: not YAML: {problem}") from error


def _entries(
    loader: yaml.SafeLoader,
    node: yaml.Node,
    path: Path,
    prefix: str,
    outer: Sequence[yaml.Node],
    lines: dict[str, int],
) -> Iterator[Entry]:
    """`outer`: the groups around `node`. `lines`: of all keys before it; `a.b` is `b` of group `a`, too.

    Raises: ConfigError.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: the file is a group of settings")
    for key_node, value_node in node.value:
        key, line = prefix + str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
        source, same = f"{path}:{line}", key.replace("-", "_")  # in files of other servers
        if same in lines:
            raise ConfigError(f"{source}: {key} stands in line {lines[same]} already")
        lines[same] = line
        if not isinstance(value_node, yaml.MappingNode) or not value_node.value:
            try:
                value = loader.construct_object(value_node, deep=True)
            except ValueError as error:  # of a 32nd of March
                raise ConfigError(f"{source}: {key} is not a value: {error}") from error
            yield Entry(key=key, value=value, source=source)
            continue
        if value_node in (*outer, node):  # by an alias
            raise ConfigError(f"{source}: {key} contains itself")
        yield Entry(key=key, value=None, source=source, is_group=True)
        yield from _entries(loader, value_node, path, f"{key}.", (*outer, node), lines)

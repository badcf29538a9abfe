"""Opens a YAML file as nodes, which know their lines. JSON is YAML."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigError

if TYPE_CHECKING:  # a client has settings (TLS) and reads none: only what reads a file imports yaml
    import yaml


@contextmanager
def open_node(path: Path) -> Iterator[tuple[yaml.SafeLoader, yaml.Node | None]]:
    """The file's only node, and the loader that constructs its values; None for an empty file.

    Raises: ConfigError, with the line, for a file that cannot be read, also where the block constructs a value.
    """
    import yaml

    try:
        with path.open(encoding="utf-8") as stream:
            # JSON may be indented by tabs, and has none elsewhere.
            loader = yaml.SafeLoader(stream.read().replace("\t", " ") if path.suffix == ".json" else stream)
            try:
                yield loader, loader.get_single_node()
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

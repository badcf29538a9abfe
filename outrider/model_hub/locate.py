"""Resolves the model's name in the settings to a local directory of its files. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.cache_directory import user_cache_directory
from outrider.errors import ModelError, NotFoundError
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.default_model import DEFAULT_MODEL_REVISION, default_directory, fetch_default_model
from outrider.model_hub.fingerprint import indexed_files, weight_names
from outrider.model_hub.gguf.directory import gguf_directory
from outrider.progress import Progress, no_progress

_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
"""Ends the name of a part of a split GGUF model."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
DOWNLOADED = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
"""Files of a hub model to download besides the weights that transformers loads; many repositories have more formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLocation:
    """A model's directory, in transformers' layout or of a GGUF model, and its name."""

    directory: Path
    name: str
    revision: str = ""


def cache_directory(config: ModelConfig) -> Path:
    """Returns the directory of converted models."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else user_cache_directory()


def is_available_locally(config: ModelConfig) -> bool:
    """Returns whether the model is on this machine, with nothing to download or to convert."""
    if config.id == DEFAULT_MODEL_ID:
        return default_directory(cache_directory(config)).is_dir()
    path = Path(config.id).expanduser()
    return (path / "config.json").is_file() or is_gguf(path)


def locate_model(config: ModelConfig, *, progress: Progress = no_progress) -> ModelLocation:
    """Returns the location of `config.id`, downloaded if necessary.

    Raises: NotFoundError if the id is neither the default model, a directory, a GGUF file, nor on the hub; ModelError
    if the download or the cache fails, or a GGUF model is damaged or not supported.
    """
    if config.id == DEFAULT_MODEL_ID:
        directory = fetch_default_model(cache_directory(config), progress=progress)
        return ModelLocation(directory=directory, name=config.name or config.id, revision=DEFAULT_MODEL_REVISION)
    directory = Path(config.id).expanduser()
    if is_gguf(directory):
        name = config.name or _PART_NUMBER.sub("", directory.absolute().name.removesuffix(".gguf"))
        location = gguf_directory(directory, cache_directory(config), progress=progress)
        return ModelLocation(directory=location, name=name)
    if directory.is_dir():
        directory = directory.resolve()
        if not (directory / "config.json").is_file():
            if (directory / "adapter_config.json").is_file():
                raise ModelError(
                    f"{directory} is an adapter (LoRA), not a model: set model.id to the model that it was "
                    f"trained for, and model.adapters to NAME={directory}"
                )
            raise ModelError(f"{directory} has no config.json: it is not a transformers model")
        return ModelLocation(directory=directory, name=config.name or directory.name)
    if (
        directory.suffix == ".gguf"
        or directory.is_absolute()
        or config.id.startswith((".", "~"))
        or not HUB_ID.fullmatch(config.id)
    ):
        raise NotFoundError(f"model.id {config.id!r} is neither a directory, a GGUF file nor a Hugging Face id")
    directory = _download(config)
    return ModelLocation(directory=directory, name=config.name or config.id, revision=directory.name)


def is_gguf(path: Path) -> bool:
    """Returns whether the path is a GGUF file, or a directory with GGUF files and no config.json."""
    if path.is_dir():
        return not (path / "config.json").is_file() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and path.is_file()


def _download(config: ModelConfig) -> Path:
    """Downloads a hub model to huggingface_hub's own cache, with the user's credentials and progress bars."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    def snapshot(patterns: tuple[str, ...]) -> Path:
        return Path(snapshot_download(config.id, revision=config.revision or None, allow_patterns=list(patterns)))

    try:
        directory = snapshot(DOWNLOADED)
        for name in weight_names(directory):
            index = directory / f"{name}.index.json"
            names = indexed_files(index) if index.is_file() else [name]
            directory = snapshot((*DOWNLOADED, *names))
            if all((directory / part).is_file() for part in names):
                break
    except RepositoryNotFoundError as error:
        raise NotFoundError(f"model.id {config.id!r} is not on the Hugging Face hub, or needs a login") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"model.id {config.id!r} could not be downloaded: {_first_cause(error)}; without a network, give a local "
            f"directory or the default model {DEFAULT_MODEL_ID}"
        ) from error
    return directory


def _first_cause(error: BaseException) -> str:
    """Returns the first cause on one line. The hub's own error says only that nothing is cached, not why."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__

"""READ FIRST: opens the head that `model.head` names, in nodes that run its target. Torch-free once it is packed.

Native kernels read a head from packed weights, which are mapped like those of their model. The first process that
finds no packed weights packs the checkpoint (see outrider.model_hub.open).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

from outrider.engine.device import needs_torch
from outrider.engine.feature_spec import FeatureSpec
from outrider.errors import ModelError
from outrider.heads.default_packing import pack_default_head
from outrider.heads.locate import DEFAULT_HEAD, head_folder
from outrider.heads.packed_head import PackedHead
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.default_model import DEFAULT_MODEL_REVISION
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.packed_weights import Packed, open_packed


class TargetHead:
    """The head that `model.head` names. A packed head is opened once, for both its reduction and its drafts."""

    def __init__(self, config: ModelConfig) -> None:
        """Finds the head's folder, whose files are read later. Raises: ConfigError if it does not exist."""
        self.folder = head_folder(config)
        self.cuda_graphs = config.cuda_graphs
        self._packed: PackedHead | None = None

    def packed(self, model: LoadedModel) -> PackedHead | None:
        """Returns the result of `open_packed_head`, or None if there is no head. All calls must pass the same model."""
        if self._packed is None and self.folder is not None:
            self._packed = open_packed_head(self.folder, model)
        return self._packed

    def reduction(self, model: LoadedModel) -> FeatureSpec | None:
        """Returns the reduction to features that the model computes for the head, or None if there is no head.

        Raises: as `open_packed_head`.
        """
        if self.folder is None:
            return None
        if (packed := self.packed(model)) is not None:
            return packed.reduction
        with needs_torch(f"the head {self.folder}"):
            from outrider.heads.checkpoint import Target
            from outrider.heads.open import read_reduction
        return read_reduction(self.folder, Target.open(model.directory))


def open_packed_head(folder: Path, model: LoadedModel) -> PackedHead | None:
    """Opens the head in this folder for the kernels that compute its target. Several processes may call it at once.

    Returns None if torch computes the head or its target, or if packed weights are not kept. Raises: as
    `open.open_head`.
    """
    if model.packed_key is None:
        return None
    content = _content_hash(folder)

    def pack() -> Packed | None:
        assert model.cpu_kernels is not None
        head: PackedHead | None
        if folder == DEFAULT_HEAD and model.info.revision == DEFAULT_MODEL_REVISION and model.spec.dtype == "bfloat16":
            window = read_json(model.directory / "config.json")["max_position_embeddings"]
            head = pack_default_head(folder, model.directory, model.cpu_kernels, window)
        else:
            with needs_torch(f"the head {folder}"):
                from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
                from outrider.heads.checkpoint import Target
                from outrider.heads.open import pack_head
            head = pack_head(folder, Target.open(model.directory), TORCH_DTYPES[model.spec.dtype], model.cpu_kernels)
        if head is None or _content_hash(folder) != content:  # unequal if files were replaced meanwhile
            return None
        return head.as_packed()

    key = model.packed_key.derive_key(str(folder.absolute()), content)
    # The packed head is read in parts, because a prefill node reads only the reduction.
    packed, _ = open_packed(key, pack, is_read_in_parts=True)
    return None if packed is None else PackedHead.of_packed(packed)


def _content_hash(folder: Path) -> str:
    """Returns a hash of a head's files. Missing files count as empty, because opening the head reports them.

    Raises: ModelError for a file that cannot be read.
    """
    hashes = []
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        try:
            hashes.append((path.name, _file_hash(path) if path.is_file() else ""))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    return repr(hashes)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:  # is read in pieces, because it may have gigabytes
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

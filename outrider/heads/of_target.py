"""READ FIRST: what nodes have of the head that `model.head` names, beside its target. Torch-free once it is packed.

Native kernels read a head as they read their model: packed weights, which are mapped, and which the first process that
finds none makes of the checkpoint (see outrider.model_hub.open).
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


class HeadOfTarget:
    """The head that `model.head` names. Where it is packed, it is opened once, for its reduction and for its drafts."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises: ConfigError for a missing folder; what is in it is looked at later."""
        self.folder = head_folder(config)
        self.cuda_graphs = config.cuda_graphs
        self._packed: PackedHead | None = None

    def packed(self, model: LoadedModel) -> PackedHead | None:
        """As `open_packed_head`, of one model whenever it is called; None without a head, too."""
        if self._packed is None and self.folder is not None:
            self._packed = open_packed_head(self.folder, model)
        return self._packed

    def reduction(self, model: LoadedModel) -> FeatureSpec | None:
        """Of this head; None without one. Raises: as `open_packed_head`."""
        if self.folder is None:
            return None
        if (packed := self.packed(model)) is not None:
            return packed.reduction
        with needs_torch(f"the head {self.folder}"):
            from outrider.heads.checkpoint import Target
            from outrider.heads.open import read_reduction
        return read_reduction(self.folder, Target.open(model.directory))


def open_packed_head(folder: Path, model: LoadedModel) -> PackedHead | None:
    """The head of this folder for the kernels of that target. Any number of processes may call it at once.

    None where torch computes the head or its target, or where packed weights are not kept. Raises: as `open.open_head`.
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
        if head is None or _content_hash(folder) != content:  # its files may be replaced at any time
            return None
        return head.as_packed()

    key = model.packed_key.of_addition(str(folder.absolute()), content)
    # In parts, since a prefill node reads its reduction alone.
    packed, _ = open_packed(key, pack, is_read_in_parts=True)
    return None if packed is None else PackedHead.of_packed(packed)


def _content_hash(folder: Path) -> str:
    """Of all that a head is made of besides its target. What is missing counts as empty: opening will tell.

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
    with path.open("rb") as file:  # piece by piece: it may have gigabytes
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

"""The context of every stage of `checks/gpu_day.py`: the results file, the device, and models with random weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WINDOW = 4096
"""Context length of the random models, in tokens."""
FAILURE_LENGTH = 400
"""Maximum number of characters of a failure in the results. The stage's output has the whole text, which is several
pages long if a kernel does not compile."""
SHAPES: dict[str, dict[str, int]] = {
    "8b": {  # Llama-3.1-8B
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "8b half": {  # the same with half of its layers
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "0.5b": {  # the sizes of Qwen2.5-0.5B, for a Llama
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}
"""Sizes of the random models, named as in transformers' configuration."""
INITIAL_RANGES = {"8b": 0.01, "8b half": 0.01, "0.5b": 0.02, "tiny": 0.05}
"""Standard deviations of the weights. With larger ones, deep and wide models amplify rounding so much that loading
compares them with float32 on the CPU (see `check_paged_forward`), which takes half a minute."""


def write_line(path: Path, **values: Any) -> None:
    """Appends one line of JSON, and waits until it is on disk, since the next operation may crash the machine."""
    line = json.dumps({"at": round(time.time(), 1), **values})
    print(line, flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


@dataclass(slots=True, kw_only=True)
class Day:
    """The context of one stage."""

    out: Path  # folder for results, which gets at most eight files
    device: str  # "cuda" or "cpu"
    stage: str
    scratch: Path  # folder for weights and for logs of nodes
    model: str = ""  # a model's folder or id for the stage `steps`; empty: random weights
    failures: list[str] = field(default_factory=list)  # expectations that did not hold

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def logs(self) -> Path:
        """The folder for logs of this stage's nodes."""
        return self.scratch / "logs" / self.stage

    def tell(self, kind: str, **values: Any) -> None:
        """Records a result."""
        write_line(self.out / "results.jsonl", stage=self.stage, kind=kind, **values)

    def expect(self, what: str, holds: bool) -> None:  # noqa: FBT001 a claim and whether it is true
        """Records an expectation; if it does not hold, the stage fails at its end."""
        if not holds:
            self.failures.append(what)
            self.tell("failure", what=what[:FAILURE_LENGTH])

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Wraps a part of a stage. An error in it lets the stage continue, but fail at its end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 the next part may still give results
            traceback.print_exc()
            self.expect(f"{name}: {type(error).__name__}: {error}", False)

    def random_model(self, shape: str, *, draft_layers: int = 0) -> Path:
        """Returns a checkpoint of random bfloat16 weights, made on the device and kept for other stages.

        The tokenizer has every id, because the sampler chooses only known ones.

        `draft_layers`: if not 0, only so many first layers change the output: those after them end in projections of
        zeros, but cost as much as any. The checkpoint's subfolder `draft` has a model of the first layers alone, which
        so gives the same tokens at a lower cost.
        """
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoConfig, AutoModelForCausalLM

        from tests.support.tiny_model import make_tiny_model

        sizes = SHAPES[shape]
        settings = {**sizes, "max_position_embeddings": WINDOW, "initializer_range": INITIAL_RANGES[shape]}
        described = (sorted(settings.items()), torch.__version__, self.device, draft_layers)
        path = self.scratch / f"{shape.replace(' ', '-')}-{hashlib.sha256(repr(described).encode()).hexdigest()[:12]}"
        if (path / "complete").exists():
            return path
        started = time.monotonic()
        shutil.rmtree(path, ignore_errors=True)  # left by a stage that was cut off
        make_tiny_model(path)  # for its tokenizer and chat template
        (path / "model.safetensors").unlink()
        tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = tokenizer["model"]["vocab"]
        vocab |= {f"<filler {index}>": index for index in range(len(vocab), sizes["vocab_size"])}
        Tokenizer.from_str(json.dumps(tokenizer)).save(str(path / "tokenizer.json"))
        config = AutoConfig.for_model("llama", bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)
        torch.manual_seed(1)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        layers = model.model.layers
        for layer in layers[draft_layers:] if draft_layers else ():
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                torch.nn.init.zeros_(projection.weight)
        model.save_pretrained(path, max_shard_size="2GB")  # several files, which are hashed in parallel
        if draft_layers:
            model.model.layers, config.num_hidden_layers = layers[:draft_layers], draft_layers
            model.save_pretrained(path / "draft")
            for each in path.glob("tokenizer*"):
                shutil.copy(each, path / "draft")
        (path / "complete").touch()
        self.tell("weights", shape=shape, seconds=round(time.monotonic() - started, 1), folder=str(path))
        return path

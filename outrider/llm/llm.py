"""`LLM`, which runs a cluster and answers batches with it."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from outrider.client import GenerateOptions
from outrider.cluster.child import ClusterEvent, EventKind
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import DECODE, ClusterConfig
from outrider.cluster.event_printer import EventPrinter
from outrider.cluster.gpus import assign_gpus
from outrider.cluster.plan import Launch
from outrider.config.imports import vllm_entries
from outrider.config.resolve import CONFIG_FILE_VARIABLE, ResolvedConfig, load_config
from outrider.config.values import is_null
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.llm.adapters import ADAPTER_ROOT, LoadedAdapters, LoRARequests
from outrider.llm.batch import Batch, MakeBar
from outrider.llm.outputs import RequestOutput
from outrider.llm.prompts import PromptType, Request, Source, convert_each, read_conversations, read_prompts
from outrider.llm.sampling_params import SamplingParams
from outrider.lossy_stream import LossyStream, lossy
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.locate import is_available_locally, locate_model

SEED_BITS = 53
"""Number of bits of a seed that the LLM draws, as many as in the seeds that routers draw."""
NUM_WAITING = 64
"""Number of requests that wait at the router while others fill the decode nodes; less than `router.max_waiting`."""
VLLM_DEFAULTS = (("gpu_memory_utilization", 0.9), ("gpu_memory_utilization", 0.92))
"""Arguments with vLLM's default values. They are ignored, so that our own defaults apply."""
AUTHENTICATION_SETTINGS = ("router.token_file", "router.tls.", "security.tls.")
"""Prefixes of the settings that make routers refuse plaintext requests or requests without a token."""
UseTqdm = bool | MakeBar


_RENDER = "render the prompt with get_tokenizer().apply_chat_template and pass its token ids to generate"
_UNSUPPORTED_ARGUMENTS = {
    "priority": "the requests of one LLM have equal priority, and start in their order",
    "prompt_token_ids": "pass token ids as prompts",
    "guided_options_request": "use structured_outputs of SamplingParams",
    "tokenization_kwargs": "encode with get_tokenizer() and pass token ids",
    "mm_processor_kwargs": "prompts are text",
    "chat_template": _RENDER,
    "chat_template_content_format": "contents are sent to the template as text",
}
"""Arguments of vLLM's `generate` and `chat` that are not supported, and what to do instead."""


class LLM:
    """A model in child processes, which end when this process ends in any way. Thread-safe.

    It is closed at the end of its `with` block, by `close`, when it is garbage collected, or at the interpreter's exit.
    Ctrl-C in `generate` aborts the requests on all nodes and raises KeyboardInterrupt; the LLM stays usable.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL_ID,
        *,
        draft: str | None = None,
        seed: int | None = 0,
        settings: Mapping[str, object] | None = None,
        log_dir: str | Path | None = None,
        enable_lora: bool = False,
        **engine_args: Any,
    ) -> None:
        """Starts the cluster and returns when the model is served.

        Args:
            model: a directory, a Hugging Face id, or the default model.
            draft: as in `outrider up --draft`: none, ngram, suffix, draft_model:ID or head:DIR; by default ngram.
            seed: seeds the generator that draws, in order, a seed for each request that has none, so that a script
                gets the same answers each time. None: random seeds.
            settings: as in `outrider up --set`, for example {"decode_node.max_running_sequences": 8}.
            log_dir: folder for each process's log.
            enable_lora: whether `lora_request` may be used. Any process of this machine that finds the router may then
                load adapters from any directory that this user can read.
            engine_args: vLLM's arguments that have an equivalent (docs/offline.md).

        Raises: TypeError or ValueError if an argument is not supported, PeerLostError if the model cannot be served.
        """
        ours = {"model.id": model, "cluster.draft": draft, "cluster.port": 0, "cluster.openai_port": "null"}
        ours["model.adapter_directory"] = ADAPTER_ROOT if enable_lora else None
        given = {**ours, **(settings or {})}
        overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
        try:
            resolved = _load(engine_args, overrides)
            node_environ, node_overrides = assign_gpus(resolved.sections["cluster"], resolved)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for warning in resolved.warnings:
            warnings.warn(warning, stacklevel=2)
        config, self._model = resolved.sections["cluster"], resolved.sections["model"]
        launch = Launch(
            overrides=(*resolved.overrides, *overrides),
            node_overrides=node_overrides,
            node_environ=node_environ,
            log_directory=None if log_dir is None else Path(log_dir),
            locate_model=not is_available_locally(self._model),
        )
        cluster = Cluster(config, launch)
        cluster.on_event = partial(_show, EventPrinter(lossy(sys.stderr)))
        self._seeds = None if seed is None else random.Random(seed)  # noqa: S311 no secrets
        self._request_ids = itertools.count()
        self._finalizer = weakref.finalize(self, _stop, cluster)  # runs at the interpreter's exit, too
        try:
            cluster.start()
            cluster.wait_serving()
        except BaseException:
            self.close()
            raise
        self._target = cluster.router_address
        self._adapters = LoadedAdapters(self._target, is_enabled=enable_lora)
        running = [int(node.description["max_running_sequences"]) for node in cluster.nodes if node.role == DECODE]
        self._num_outstanding = sum(running) + NUM_WAITING

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,  # noqa: FBT002 vLLM's
        lora_request: LoRARequests = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Returns the answers in the order of the prompts.

        Args:
            prompts: one or more texts, lists of token ids, or dicts (`TokensPrompt`).
            sampling_params: one for all prompts, or one for each; by default `SamplingParams()`.
            use_tqdm: whether to show progress on standard error, or a replacement for `tqdm`.
            lora_request: an adapter for all prompts, or one for each, where None is the model itself. Its directory
                must stay where it is, because nodes that start later read it again.
            unsupported: vLLM's other arguments, accepted only with their defaults.

        Raises: ValueError, before anything is generated, that names a prompt that exceeds the model's window or an
        invalid parameter; RuntimeError after `close`; PeerLostError, without any answer, if nodes end repeatedly.
        """
        _check_arguments("generate", unsupported)
        return self._answer("prompts", read_prompts(prompts), sampling_params, use_tqdm, lora_request=lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,  # noqa: FBT002 vLLM's
        lora_request: LoRARequests = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Returns the answers to one or more conversations, like `generate`. The model's chat template renders them.

        `messages` have OpenAI's form, {"role": "user", "content": "…"}, with text only. `tools`, also in OpenAI's form,
        are passed to the template; tool calls are part of the answer's text.
        """
        _check_arguments("chat", unsupported)
        variables = {**(chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        options = GenerateOptions(
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self._answer(
            "messages", read_conversations(messages), sampling_params, use_tqdm, options, lora_request=lora_request
        )

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer, from transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(locate_model(self._model).directory)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns `SamplingParams()`; the model's generation_config.json is not read."""
        return SamplingParams()

    def close(self) -> None:
        """Stops all processes and frees their resources, within about 5 s, or at once on Ctrl-C. Idempotent."""
        if self._finalizer():
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _answer(
        self,
        name: str,
        sources: Sequence[Source],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: UseTqdm,
        common: GenerateOptions | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answers prompts. `name`: the name of `sources` in errors. `common`: options of all requests."""
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed")
        each = [params or SamplingParams()] * len(sources) if isinstance(params, SamplingParams | None) else params
        if len(each) != len(sources):
            raise ValueError(f"there are {len(sources)} {name}, but {len(each)} sampling_params")
        options = convert_each("sampling_params", SamplingParams.to_options, each)
        adapters = self._adapters.options_of(lora_request, len(sources))
        requests = [
            Request(
                name=f"{name}[{index}]",
                content=content,
                text=text,
                params=each[index],
                options={**self._next_options(), **options[index], **(common or {}), **adapters[index]},
            )
            for index, (content, text) in enumerate(sources)
        ]
        shown = lossy(sys.stderr)
        with Batch(self._target, num_outstanding=self._num_outstanding) as batch:
            answers = batch.run(requests, _make_bar(use_tqdm, shown))
        shown.drain()
        return answers

    def _next_options(self) -> GenerateOptions:
        """Returns the next request's id and seed as options."""
        options = GenerateOptions(request_id=str(next(self._request_ids)))
        return options if self._seeds is None else {**options, "seed": self._seeds.getrandbits(SEED_BITS)}


def _check_arguments(method: str, arguments: Mapping[str, Any]) -> None:
    """Checks that unsupported arguments of vLLM have their defaults. Raises: TypeError, ValueError."""
    for name, value in arguments.items():
        if name not in _UNSUPPORTED_ARGUMENTS:
            raise TypeError(f"LLM.{method}() has no argument {name!r}")
        if value not in (None, False, "auto"):
            raise ValueError(f"LLM.{method}({name}={value!r}) is not supported: {_UNSUPPORTED_ARGUMENTS[name]}")


def _make_bar(use_tqdm: UseTqdm, shown: LossyStream) -> MakeBar:
    """Returns the factory of progress bars. `shown`: the stream to which tqdm writes."""
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    columns = shutil.get_terminal_size().columns if shown.isatty() else None
    return partial(tqdm, disable=not use_tqdm, file=shown, ncols=columns)


def _load(engine_args: Mapping[str, Any], overrides: Sequence[str]) -> ResolvedConfig:
    """Loads the configuration.

    Raises: ConfigError if a setting of the model, its memory or the cluster is invalid, or would make the router refuse
    the LLM's requests.
    """
    kinds = {"cluster": ClusterConfig, "model": ModelConfig, "kv_cache": KVCacheConfig}
    file = os.environ.get(CONFIG_FILE_VARIABLE)  # every process of the cluster reads it
    if "port" in engine_args:
        raise ConfigError("LLM() port: an LLM does not serve HTTP; use outrider up --openai PORT")
    given = {name: value for name, value in engine_args.items() if (name, value) not in VLLM_DEFAULTS}
    resolved = load_config(
        kinds,
        file=Path(file) if file else None,
        environ=os.environ,
        overrides=overrides,
        arguments=vllm_entries(given, source="LLM()"),
    )
    for key, entry in resolved.elsewhere.items():
        if key.startswith(AUTHENTICATION_SETTINGS) and not is_null(entry.value):
            raise ConfigError(
                f"{entry.source}: an LLM calls its router in plaintext and without a token, which {key} would refuse; "
                f'its services are on loopback, so pass settings={{"{key}": "null"}}'
            )
    return resolved


def _stop(cluster: Cluster) -> bool:
    """Stops the cluster. Returns whether Ctrl-C interrupted that.

    It does not raise KeyboardInterrupt, because nothing would catch this at the interpreter's exit.
    """
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.kill_all()
        cluster.stop()
        return True
    return False


def _show(printer: EventPrinter, event: ClusterEvent) -> None:
    """Shows progress, refused nodes and lost ones; nothing else, since the terminal is the caller's."""
    if event.kind in (EventKind.PROGRESS, EventKind.REFUSED, EventKind.DIED):
        printer.show(event)

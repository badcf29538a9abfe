"""`LLM`, a cluster of this process's own, and batches that it answers."""

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
from outrider.cluster.gpus import allot
from outrider.cluster.plan import Launch
from outrider.config.imports import vllm_entries
from outrider.config.resolve import CONFIG_FILE_VARIABLE, ResolvedConfig, load_config
from outrider.config.values import is_null
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.llm.batch import Batch, MakeBar
from outrider.llm.outputs import RequestOutput
from outrider.llm.prompts import PromptType, Request, Source, for_each, read_conversations, read_prompts
from outrider.llm.sampling_params import SamplingParams
from outrider.lossy_stream import LossyStream, lossy
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.locate import is_at_hand, locate_model

SEED_BITS = 53
"""As the router draws seeds."""
NUM_WAITING = 64
"""Requests that wait at the router, besides those that decode nodes have room for. Less than `router.max_waiting`."""
UNSET = (("gpu_memory_utilization", 0.9), ("gpu_memory_utilization", 0.92))
"""Defaults of vLLM's arguments that leave ours in force."""
CLOSED = ("router.token_file", "router.tls.", "security.tls.")
"""Beginnings of the settings by which routers refuse requests in plaintext or without a token."""
UseTqdm = bool | MakeBar


_RENDER = "render the prompt with get_tokenizer().apply_chat_template and pass its token ids to generate"
_INSTEAD = {
    "priority": "requests of one LLM are equal, and start in their order",
    "prompt_token_ids": "pass token ids as prompts",
    "guided_options_request": "use structured_outputs of SamplingParams",
    "lora_request": "merge the adapter into the model",
    "tokenization_kwargs": "encode with get_tokenizer() and pass token ids",
    "mm_processor_kwargs": "prompts are text",
    "chat_template": _RENDER,
    "chat_template_content_format": "contents are sent to the template as text",
}
"""By argument of vLLM's `generate` and `chat`, what to do without it."""


class LLM:
    """A model in processes of its own, which end with this one, however it ends.

    As a context manager it is closed after the block; otherwise by `close`, when it is garbage collected, or at the
    interpreter's exit. Ctrl-C in `generate` raises KeyboardInterrupt: the requests are aborted on all nodes, and the
    LLM stays usable. Thread-safe.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL_ID,
        *,
        draft: str | None = None,
        seed: int | None = 0,
        settings: Mapping[str, object] | None = None,
        log_dir: str | Path | None = None,
        **engine_args: Any,
    ) -> None:
        """Returns when the model serves.

        Args:
            model: a directory, a Hugging Face id, or the default model.
            draft: as `outrider up --draft`: none, ngram, suffix, draft_model:ID or head:DIR; by default ngram.
            seed: from which requests without a seed get theirs, in their order: the same script has the same answers.
                None: they are random.
            settings: as `outrider up --set`, such as {"decode_node.max_running_sequences": 8}.
            log_dir: keep each process's log there.
            engine_args: vLLM's, as far as they have an equivalent (docs/offline.md).

        Raises: TypeError or ValueError for an argument that cannot be honoured, PeerLostError when the model cannot
        be served.
        """
        ours = {"model.id": model, "cluster.draft": draft, "cluster.port": 0, "cluster.openai_port": "null"}
        given = {**ours, **(settings or {})}
        overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
        try:
            resolved = _load(engine_args, overrides)
            node_environ, node_overrides = allot(resolved.sections["cluster"], resolved)
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
            locate_model=not is_at_hand(self._model),
        )
        cluster = Cluster(config, launch)
        cluster.on_event = partial(_show, EventPrinter(lossy(sys.stderr)))
        self._seeds = None if seed is None else random.Random(seed)  # noqa: S311 no secrets
        self._request_ids = itertools.count()
        self._finalizer = weakref.finalize(self, _stop, cluster)  # also at the interpreter's exit
        try:
            cluster.start()
            cluster.wait_serving()
        except BaseException:
            self.close()
            raise
        self._target = cluster.router_address
        running = [int(node.description["max_running_sequences"]) for node in cluster.nodes if node.role == DECODE]
        self._num_outstanding = sum(running) + NUM_WAITING

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,  # noqa: FBT002 vLLM's
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts: texts, lists of token ids, or dicts (`TokensPrompt`).

        Args:
            prompts: one or many.
            sampling_params: for all prompts, or one for each; by default `SamplingParams()`.
            use_tqdm: whether to show progress on standard error; or what to use instead of `tqdm`.
            unsupported: vLLM's other arguments, which pass at their defaults.

        Raises: ValueError that names a prompt that does not fit the model's window, before anything is generated, or
        a parameter; RuntimeError after `close`; PeerLostError when nodes end again and again. Then no answer is
        returned.
        """
        _check_arguments("generate", unsupported)
        return self._answer("prompts", read_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,  # noqa: FBT002 vLLM's
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation or many, rendered by the model's chat template. Otherwise as `generate`.

        `messages` are OpenAI's, {"role": "user", "content": "…"}, of text only. `tools` are OpenAI's too, for the
        template; calls of them are in the answer's text.
        """
        _check_arguments("chat", unsupported)
        variables = {**(chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        options = GenerateOptions(
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self._answer("messages", read_conversations(messages), sampling_params, use_tqdm, options)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(locate_model(self._model).directory)

    def get_default_sampling_params(self) -> SamplingParams:
        """`SamplingParams()`: what the model's generation_config.json says is not read."""
        return SamplingParams()

    def close(self) -> None:
        """Stops all processes, within some 5 s or, with Ctrl-C, at once, and frees what they hold. Idempotent."""
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
    ) -> list[RequestOutput]:
        """`name`: what errors call the sources. `common`: options of all requests."""
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed")
        each = [params or SamplingParams()] * len(sources) if isinstance(params, SamplingParams | None) else params
        if len(each) != len(sources):
            raise ValueError(f"there are {len(sources)} {name}, but {len(each)} sampling_params")
        options = for_each("sampling_params", SamplingParams.to_options, each)
        requests = [
            Request(
                name=f"{name}[{index}]",
                content=content,
                text=text,
                params=each[index],
                options={**self._next_options(), **options[index], **(common or {})},
            )
            for index, (content, text) in enumerate(sources)
        ]
        shown = lossy(sys.stderr)
        with Batch(self._target, num_outstanding=self._num_outstanding) as batch:
            answers = batch.run(requests, _make_bar(use_tqdm, shown))
        shown.drain()
        return answers

    def _next_options(self) -> GenerateOptions:
        """What every request has of its own."""
        options = GenerateOptions(request_id=str(next(self._request_ids)))
        return options if self._seeds is None else {**options, "seed": self._seeds.getrandbits(SEED_BITS)}


def _check_arguments(method: str, arguments: Mapping[str, Any]) -> None:
    """What vLLM has and we have not passes at its default only. Raises: TypeError, ValueError."""
    for name, value in arguments.items():
        if name not in _INSTEAD:
            raise TypeError(f"LLM.{method}() has no argument {name!r}")
        if value not in (None, False, "auto"):
            raise ValueError(f"LLM.{method}({name}={value!r}) is not supported: {_INSTEAD[name]}")


def _make_bar(use_tqdm: UseTqdm, shown: LossyStream) -> MakeBar:
    """`shown`: where tqdm writes."""
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    columns = shutil.get_terminal_size().columns if shown.isatty() else None
    return partial(tqdm, disable=not use_tqdm, file=shown, ncols=columns)


def _load(engine_args: Mapping[str, Any], overrides: Sequence[str]) -> ResolvedConfig:
    """Raises: ConfigError for a wrong setting of the model, its memory or the cluster, and for one by which the router
    would refuse what we ask.
    """
    kinds = {"cluster": ClusterConfig, "model": ModelConfig, "kv_cache": KVCacheConfig}
    file = os.environ.get(CONFIG_FILE_VARIABLE)  # which every process reads
    if "port" in engine_args:
        raise ConfigError("LLM() port: nothing is served over HTTP; outrider up --openai PORT does that")
    given = {name: value for name, value in engine_args.items() if (name, value) not in UNSET}
    resolved = load_config(
        kinds,
        file=Path(file) if file else None,
        environ=os.environ,
        overrides=overrides,
        arguments=vllm_entries(given, source="LLM()"),
    )
    for key, entry in resolved.elsewhere.items():
        if key.startswith(CLOSED) and not is_null(entry.value):
            raise ConfigError(
                f"{entry.source}: LLM asks its router in plaintext and without a token, so {key} would refuse it; its "
                f'services are on loopback: settings={{"{key}": "null"}}'
            )
    return resolved


def _stop(cluster: Cluster) -> bool:
    """Whether Ctrl-C came meanwhile. At the interpreter's exit nobody else would catch it."""
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.kill_all()
        cluster.stop()
        return True
    return False


def _show(printer: EventPrinter, event: ClusterEvent) -> None:
    """Long work and losses only: what scripts print is their own."""
    if event.kind in (EventKind.PROGRESS, EventKind.REFUSED, EventKind.DIED):
        printer.show(event)

"""The flags common to commands that start a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.cluster.config import ClusterConfig
from outrider.config.arguments import add_setting_flags, add_settings_arguments
from outrider.model_hub.config import ModelConfig

HEAD = "model.head"
SECTIONS = {"model": ModelConfig, "cluster": ClusterConfig}
CLUSTER_FLAGS = {
    "model": "model.id",
    "dtype": "model.dtype",
    "draft": "cluster.draft",
    "prefill-nodes": "cluster.prefill_nodes",
    "decode-nodes": "cluster.decode_nodes",
    "draft-nodes": "cluster.draft_nodes",
    "routers": "cluster.routers",
    "gpus": "cluster.gpus",
    "port": "cluster.port",
}
"""Flags, each with the setting that it sets."""
WITHOUT_PREFIX_CACHE = "kv_cache.prefix_cache=false"
"""Override for commands that send a prompt twice, so that both runs do the same work, including the KV transfer."""


def add_cluster_arguments(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Adds the flags of commands that start a cluster. Flags override the settings of file and environment.

    `defaults` are the command's own defaults of flags, such as `port=0`.
    """
    add_setting_flags(parser, CLUSTER_FLAGS, SECTIONS)
    parser.add_argument(
        "--head",
        dest=HEAD,
        metavar="DIR",
        type=lambda text: Path(text).expanduser().absolute(),
        help="let decode nodes draft with this drafter head when that pays",
    )
    parser.add_argument(
        "--store",
        dest="router.store",
        metavar="URL",
        help="store that routers share: valkey://host:port; default: each router keeps answers in its own memory",
    )
    parser.set_defaults(**{CLUSTER_FLAGS[name]: value for name, value in defaults.items()})
    add_settings_arguments(parser)
    parser.add_argument("--log-dir", metavar="DIR", type=Path, help="keep each process's log in this directory")

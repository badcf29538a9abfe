"""Where the nodes of `outrider up` compute, and their shares of a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.cluster import gpus
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.cluster.gpus import assign_gpus, visible_gpus
from outrider.cluster.plan import Launch
from outrider.config.resolve import load_config
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.memory import GPU_SHARE
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig

SECTIONS = {"model": ModelConfig, "kv_cache": KVCacheConfig}
EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


def settings_of(*overrides, device="cuda"):
    return load_config(SECTIONS, file=None, environ={}, overrides=[f"model.device={device}", *overrides])


def placed(config, *overrides, environ=EIGHT, by_role=None):
    """Returns (GPUs by node name, memory share in percent by name of a node that shares a GPU)."""
    node_environ, node_overrides = assign_gpus(config, settings_of(*overrides), by_role, environ=environ)
    shares = {
        name: float(text.removeprefix("kv_cache.memory=").removesuffix("%"))
        for name, texts in node_overrides.items()
        for text in texts
        if text.startswith("kv_cache.memory=")
    }
    assert all(set(variables) == {"CUDA_VISIBLE_DEVICES"} for variables in node_environ.values())
    return {name: variables["CUDA_VISIBLE_DEVICES"] for name, variables in node_environ.items()}, shares


def test_each_node_has_a_gpu_of_its_own_while_there_are_enough():
    config = ClusterConfig(prefill_nodes=2, decode_nodes=2, draft_nodes=2, draft="draft_model:small")
    assert placed(config) == (
        {"decode-0": "0", "decode-1": "1", "prefill-0": "2", "prefill-1": "3", "draft-0": "4", "draft-1": "5"},
        {},
    )


def test_prompt_lookup_needs_no_gpu():
    assert placed(ClusterConfig(draft_nodes=3)) == ({"decode-0": "0", "prefill-0": "1"}, {})


def test_nodes_on_one_gpu_divide_what_one_would_take():
    where, shares = placed(ClusterConfig(), environ={"CUDA_VISIBLE_DEVICES": "GPU-4b1d"})
    assert where == {"decode-0": "GPU-4b1d", "prefill-0": "GPU-4b1d"}
    assert sum(shares.values()) == pytest.approx(100 * GPU_SHARE, abs=1e-3)
    assert shares["decode-0"] == pytest.approx(shares["prefill-0"], rel=0.05)
    where, shares = placed(ClusterConfig(draft="draft_model:small"), environ={"CUDA_VISIBLE_DEVICES": "3"})
    assert set(where.values()) == {"3"}
    assert sum(shares.values()) == pytest.approx(100 * GPU_SHARE, abs=1e-3)
    assert 5 < shares["draft-0"] < 10


@pytest.mark.parametrize(
    ("config", "num_gpus", "together"),
    [
        (ClusterConfig(draft="draft_model:small"), 2, [{"prefill-0", "draft-0"}]),
        (ClusterConfig(draft="head:small"), 2, [{"prefill-0", "draft-0"}]),
        (ClusterConfig(prefill_nodes=2, decode_nodes=2), 3, [{"prefill-0", "prefill-1"}]),
        (ClusterConfig(prefill_nodes=3), 2, [{"decode-0", "prefill-2"}, {"prefill-0", "prefill-1"}]),
        (ClusterConfig(prefill_nodes=0, decode_nodes=3), 2, [{"decode-0", "decode-2"}]),
    ],
)
def test_where_gpus_are_few_decode_nodes_are_the_last_to_share_theirs(config, num_gpus, together):
    names = EIGHT["CUDA_VISIBLE_DEVICES"].split(",")[:num_gpus]
    where, shares = placed(config, environ={"CUDA_VISIBLE_DEVICES": ",".join(names)})
    on_each = [{name for name, gpu in where.items() if gpu == own} for own in names]
    assert all(on_each)
    assert [nodes for nodes in on_each if len(nodes) > 1] == together
    for nodes in together:
        assert sum(shares.pop(name) for name in nodes) == pytest.approx(100 * GPU_SHARE, abs=1e-3)
    assert shares == {}


def test_a_model_on_several_gpus_has_as_many():
    config = ClusterConfig(draft="draft_model:small")
    assert placed(config, "model.tensor_parallel_size=2")[0] == {
        "decode-0": "0,1", "prefill-0": "2,3", "draft-0": "4"
    }  # fmt: skip
    where, shares = placed(config, "model.tensor_parallel_size=4", environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert where == {"decode-0": "0,1,2,3", "prefill-0": "0,1,2,3", "draft-0": "0"}
    assert sum(shares.values()) == pytest.approx(100 * GPU_SHARE, abs=1e-3)  # of GPU 0; the others have more left
    wide = {"prefill_node": settings_of("model.tensor_parallel_size=2")}
    assert placed(ClusterConfig(), by_role=wide)[0] == {"decode-0": "0", "prefill-0": "1,2"}
    assert placed(ClusterConfig(), "model.pipeline_parallel_size=2")[0] == {"decode-0": "0,1", "prefill-0": "2,3"}
    for how in ("tensor", "pipeline"):
        with pytest.raises(ConfigError, match=rf"{how}_parallel_size 4 needs as many GPUs: 1 may be used"):
            placed(config, f"model.{how}_parallel_size=4", environ={"CUDA_VISIBLE_DEVICES": "0"})


def test_gpus_may_be_chosen_and_are_then_insisted_on():
    node_environ, node_overrides = assign_gpus(ClusterConfig(gpus=("5", "2")), settings_of(device="auto"), environ={})
    assert node_environ == {
        "decode-0": {"CUDA_VISIBLE_DEVICES": "5"}, "prefill-0": {"CUDA_VISIBLE_DEVICES": "2"}
    }  # fmt: skip
    assert node_overrides == dict.fromkeys(("decode-0", "prefill-0"), ("model.device=cuda",))
    with pytest.raises(ConfigError, match=r"cluster\.gpus 8: there is no 8, only 0,1,.*,7 \(CUDA_VISIBLE_DEVICES\)"):
        placed(ClusterConfig(gpus=("8",)))
    for device in ("cpu", "cuda:1"):
        with pytest.raises(ConfigError, match=f"cluster.gpus 0 cannot be combined with model.device {device}"):
            assign_gpus(ClusterConfig(gpus=("0",)), settings_of(device=device), environ={})
    with pytest.raises(ValueError, match="names one twice"):
        ClusterConfig(gpus=("0", "0"))
    for name in ("-1", "cuda:0", "1-3", "0 1", "GPU"):
        with pytest.raises(ValueError, match=f"gpus {name} is neither a number"):
            ClusterConfig(gpus=(name,))
    assert ClusterConfig(gpus=("GPU-8f", "MIG-GPU-8f/1/0", "10")).gpus[0] == "GPU-8f"


def test_a_number_beyond_those_that_are_there_is_told_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"cluster\.gpus 1,2: there is no 2, only 0,1"):
        assign_gpus(ClusterConfig(gpus=("1", "2")), settings_of(), environ={})
    assert assign_gpus(ClusterConfig(gpus=("1", "GPU-8f")), settings_of(), environ={})[0]["prefill-0"] == {
        "CUDA_VISIBLE_DEVICES": "GPU-8f"
    }
    with pytest.raises(ConfigError, match=r"cluster\.gpus 0: .*CUDA_VISIBLE_DEVICES"):
        assign_gpus(ClusterConfig(gpus=("0",)), settings_of(), environ={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        ("0", (), {"draft-0"}),
        ("0,1", (), set()),  # beside the prefill node
        ("0,1,2", (), set()),
        ("0", ("draft_node.look_ahead=auto",), set()),
        ("0", ("draft_node.look_ahead=3",), set()),
    ],
)
def test_a_draft_model_looks_ahead_where_no_decode_node_uses_its_gpu(gpus, overrides, expected):
    config = ClusterConfig(draft="draft_model:small")
    found = assign_gpus(config, settings_of(*overrides), environ={"CUDA_VISIBLE_DEVICES": gpus})[1]
    assert {name for name, texts in found.items() if "draft_node.look_ahead=off" in texts} == expected


def test_settings_of_the_user_are_left_alone():
    """A named device is used by all nodes, and a KV cache size that is set is the size for each node."""
    node_environ, node_overrides = assign_gpus(ClusterConfig(), settings_of(device="cuda:1"), environ=EIGHT)
    assert node_environ == {}
    assert set(node_overrides) == {"decode-0", "prefill-0"}
    where, shares = placed(ClusterConfig(), "kv_cache.memory=4GiB", environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert set(where.values()) == {"0"}
    assert shares == {}


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_gpu_nothing_is_told(monkeypatch, device):
    monkeypatch.setattr(gpus, "has_gpu_driver", lambda: False)
    assert assign_gpus(ClusterConfig(), settings_of(device=device), environ=EIGHT) == ({}, {})
    monkeypatch.setattr(gpus, "has_gpu_driver", lambda: True)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert assign_gpus(ClusterConfig(), settings_of(device=device), environ=hidden) == ({}, {})


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", []),
        ("-1", []),
        ("2", ["2"]),
        ("1, GPU-8f", ["1", "GPU-8f"]),
        ("0,-1,1", ["0"]),
        ("MIG-a/1/0", ["MIG-a/1/0"]),
    ],
)
def test_the_environment_says_first_what_is_visible(value, names):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names


def test_else_device_files_say_it_or_nothing_does(monkeypatch, tmp_path):
    """In a container, /proc/driver/nvidia may list all GPUs of the machine, but device files exist only for its own."""
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    for name in ("nvidia3", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert visible_gpus({}) == ["0", "1"]
    for name in ("nvidia3", "nvidia12"):
        (tmp_path / name).unlink()
    assert visible_gpus({}) is None
    node_environ, node_overrides = assign_gpus(ClusterConfig(), settings_of(), environ={})
    assert node_environ == {}
    assert set(node_overrides) == {"decode-0", "prefill-0"}  # they share the one GPU that may exist


def test_a_node_is_started_with_its_own_environment(monkeypatch):
    spawned = {}
    process = SimpleNamespace(pid=7)
    monkeypatch.setattr(subprocess, "Popen", lambda _command, *, env, **_: spawned.update(env) or process)
    launch = Launch(
        environ={"CUDA_VISIBLE_DEVICES": "0,1", "OTHER": "kept"},
        node_environ={"decode-0": {"CUDA_VISIBLE_DEVICES": "1"}},
        locate_model=False,
    )
    cluster = Cluster(ClusterConfig(port=0), launch)
    cluster._turns_directory = Path("turns")
    cluster._spawn(cluster._child("decode-0"))
    assert (spawned["CUDA_VISIBLE_DEVICES"], spawned["OTHER"]) == ("1", "kept")

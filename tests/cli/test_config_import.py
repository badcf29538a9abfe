"""`outrider config import`, and `outrider up` with imported files and with vLLM's flags."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from outrider.cli import up
from outrider.cli.config import ROLES, sections_of
from outrider.cli.main import main
from outrider.cluster.plan import child_command, plan_children
from outrider.config.arguments import parse_role_arguments
from outrider.errors import ConfigError
from outrider.heads.locate import DEFAULT_HEAD

FILE = """\
backend: pytorch
max_batch_size: 32
print_iter_log: true
kv_cache_config: {free_gpu_memory_fraction: 0.5}
speculative_config: {decoding_type: NGram, max_draft_len: 3}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)
    path = tmp_path / "trt.yaml"
    path.write_text(FILE)
    return path


def cluster_of(*arguments):
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    parsed = parser.parse_args(["--port", "0", *arguments])
    return up.make_cluster(parsed)


def test_the_table_says_what_became_of_each_key(file, capsys):
    assert main(["config", "import", str(file)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["line", "key", "value", "result", "setting", "note"]
    assert lines[1] == ["1", "backend", "pytorch", "same"]
    assert lines[2] == ["2", "max_batch_size", "32", "set", "decode_node.max_running_sequences:", "32"]
    assert lines[3] == ["prefill_node.max_running_sequences:", "32"]
    assert lines[4][:5] == ["3", "print_iter_log", "true", "warning", "metrics"]
    assert lines[6][:6] == ["5", "speculative_config.decoding_type", "NGram", "set", "cluster.draft:", "ngram"]


def test_errors_are_all_in_the_table_and_nothing_is_written(file, capsys):
    file.write_text("max_beam_width: 4\nmax_batchsize: 3\n")
    out = file.with_name("out.yaml")
    assert main(["config", "import", str(file), "--write", str(out)]) == 1
    shown = capsys.readouterr()
    assert [line.split()[3] for line in shown.out.splitlines()[1:]] == ["error", "error"]
    assert "the nearest is max_batch_size" in shown.out
    assert shown.err.startswith(f"outrider config: {file}:1 max_beam_width: there is no beam search (and 1 more")
    assert not out.exists()


def test_a_file_that_cannot_be_written_is_said(file, capsys):
    assert main(["config", "import", str(file), "--write", str(file / "out.yaml")]) == 1
    assert "--write" in capsys.readouterr().err


def test_an_mtp_head_is_that_of_the_model_that_settings_name(file, capsys):
    file.write_text("speculative_config: {decoding_type: MTP, max_draft_len: 1}\n")
    assert main(["config", "import", str(file)]) == 1
    assert "MTP needs speculative_model_dir" in capsys.readouterr().err
    assert main(["config", "--set", f"model.id={file.parent}", "import", str(file)]) == 0
    assert f"model.head: {file.parent}\n" in capsys.readouterr().out


def test_a_value_out_of_range_is_an_error_with_its_line(file, capsys):
    file.write_text("max_num_tokens: 3\n")
    assert main(["config", "import", str(file)]) == 1
    assert f"{file}:1 max_num_tokens: decode_node.max_rows_per_step = 3 is out of range" in capsys.readouterr().err


def test_what_is_written_is_a_configuration_file_of_ours(file, capsys):
    out = file.with_name("out.yaml")
    assert main(["config", "import", str(file), "--write", str(out)]) == 0
    capsys.readouterr()
    assert f"  memory: 50%  # {file}:4 kv_cache_config.free_gpu_memory_fraction\n" in out.read_text()
    assert main(["config", "import", str(file), "--write", "-"]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main(["config", "--config", str(out)]) == 0
    from_written = capsys.readouterr().out
    assert main(["config", "--extra-engine-args", str(file)]) == 0
    imported = capsys.readouterr().out
    assert [line.partition("  # ")[0] for line in imported.splitlines()] == [
        line.partition("  # ")[0] for line in from_written.splitlines()
    ]
    assert f"memory: 50%  # {file}:4 kv_cache_config.free_gpu_memory_fraction" in imported


def test_a_file_for_one_role_is_shown_with_that_role(file, capsys):
    assert main(["config", "--extra-engine-args", f"prefill={file}"]) == 0
    shown = capsys.readouterr()
    assert str(file) not in shown.out
    assert f"warning: prefill={file} is for prefill_node, which --role shows" in shown.err
    assert main(["config", "--role", "prefill_node", "--extra-engine-args", f"prefill={file}"]) == 0
    assert f"max_running_sequences: 32  # {file}:2 max_batch_size" in capsys.readouterr().out


def settings_of(cluster):
    """Returns, by process name, the sections that the process reads from its command line."""
    found = {}
    for spec in plan_children(cluster.config, cluster.launch):
        if spec.role in ROLES:
            ports = {"port": 0, "metrics_port": 0}
            turns_file = Path("/run/turns")
            command = child_command(
                spec, cluster.config, cluster.launch, targets={}, ports=ports, turns_file=turns_file
            )
            arguments = command[command.index(spec.role) + 1 :]
            found[spec.name] = parse_role_arguments(spec.role, sections_of(spec.role), arguments, environ={})
    return found


def memory_of(cluster):
    found = settings_of(cluster)
    return {name: each["kv_cache"].size[1] for name, each in found.items() if name[:7] in ("prefill", "decode-")}


def test_each_process_of_a_cluster_reads_the_file(file, capsys):
    cluster = cluster_of("--extra-engine-args", str(file))
    assert f"{file}:3 print_iter_log" in capsys.readouterr().err
    found = settings_of(cluster)
    assert found["draft-0"]["draft_node"].proposer == "ngram"
    assert found["decode-0"]["decode_node"].num_speculative_tokens == 3
    assert found["decode-0"]["decode_node"].max_running_sequences == 32
    assert found["prefill-0"]["prefill_node"].max_running_sequences == 32
    assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head == ""


def test_a_head_of_a_file_drafts_in_decode_nodes_and_no_draft_node_starts(file):
    file.write_text(f"speculative_config: {{decoding_type: Eagle3, speculative_model_dir: {DEFAULT_HEAD}}}\n")
    cluster = cluster_of("--extra-engine-args", str(file))
    found = settings_of(cluster)
    assert set(found) == {"prefill-0", "decode-0", "router"}
    assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head == str(DEFAULT_HEAD)
    assert found["decode-0"]["decode_node"].local_head
    for explicit in (("--draft", "none"), ("--set", "cluster.draft=none")):
        found = settings_of(cluster_of("--extra-engine-args", str(file), *explicit))
        assert found["decode-0"]["model"].head == found["prefill-0"]["model"].head == ""
        assert found["decode-0"]["decode_node"].num_speculative_tokens == 0


def test_nodes_of_a_machine_divide_a_share_of_its_memory(file):
    share = {"prefill-0": 0.5 * 25 / 85, "decode-0": 0.25 * 60 / 85, "decode-1": 0.25 * 60 / 85}
    for flags in (("--extra-engine-args", str(file)), ("--gpu-memory-utilization", "0.5")):
        assert memory_of(cluster_of(*flags, "--decode-nodes", "2")) == pytest.approx(share, rel=1e-3)
        explicit = cluster_of(*flags, "--set", "kv_cache.memory=10%")
        assert memory_of(explicit) == {"prefill-0": 0.1, "decode-0": 0.1}


@pytest.mark.parametrize(("device", "part"), [("cpu", 60 / 85), ("cuda:0", 47 / 92)])
def test_a_share_for_one_role_is_that_of_each_of_its_nodes(file, device, part):
    own = file.with_name("prefill.yaml")
    own.write_text("kv_cache_config: {free_gpu_memory_fraction: 0.3}\n")
    flags = ("--extra-engine-args", f"prefill={own}", "--set", f"model.device={device}")
    assert memory_of(cluster_of(*flags))["prefill-0"] == 0.3
    both = memory_of(cluster_of("--extra-engine-args", str(file), *flags))
    assert both == pytest.approx({"prefill-0": 0.3, "decode-0": 0.5 * part}, rel=1e-3)


def test_gpus_are_named_on_the_command_line_and_divided(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cluster = cluster_of("--gpus", "0,2", "--gpu-memory-utilization", "0.8", "--prefill-nodes", "2")
    where = {name: environ["CUDA_VISIBLE_DEVICES"] for name, environ in cluster.launch.node_environ.items()}
    assert where == {"decode-0": "0", "prefill-0": "2", "prefill-1": "2"}
    assert memory_of(cluster)["prefill-0"] == pytest.approx(0.4)
    found = settings_of(cluster)
    assert found["decode-0"]["kv_cache"].memory == "80%"
    assert {name: found[name]["model"].device for name in where} == dict.fromkeys(where, "cuda")


def test_a_file_for_decode_nodes_says_who_drafts(file):
    assert cluster_of("--extra-engine-args", f"decode={file}").config.draft == "ngram"
    file.write_text("speculative_config: {decoding_type: Draft_Target, speculative_model: small}\n")
    assert cluster_of("--extra-engine-args", f"decode={file}").config.draft == "draft_model:small"
    assert cluster_of("--extra-engine-args", f"decode={file}", "--draft", "suffix").config.draft == "suffix"


@pytest.mark.parametrize("method", ["NGram", f"Eagle3, speculative_model_dir: {DEFAULT_HEAD}"])
def test_the_head_of_a_file_for_decode_nodes_is_that_of_prefill_nodes_too(file, method):
    """Otherwise features from prefill nodes would not fit the head of decode nodes."""
    file.write_text(f"speculative_config: {{decoding_type: {method}}}\n")
    found = settings_of(cluster_of("--extra-engine-args", f"decode={file}"))
    assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head != "auto"
    found = settings_of(cluster_of("--extra-engine-args", f"decode={file}", "--set", "model.head=auto"))
    assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head == "auto"


def test_flags_of_vllm_are_settings(tmp_path):
    speculative = json.dumps({"method": "suffix", "num_speculative_tokens": 2})
    cluster = cluster_of(
        *("--max-model-len", "2k", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "2", "--served-model-name", "mine"),
        *("--no-enable-prefix-caching", "--enforce-eager", "--speculative-config", speculative),
        *("--enable-lora", "--lora-modules", f"sql={tmp_path}", f"law={tmp_path}"),
    )
    assert cluster.config.draft == "suffix"
    assert set(cluster.launch.overrides) >= {
        "model.max_model_len=2000",
        "model.pipeline_parallel_size=2",
        "decode_node.max_running_sequences=8",
        "decode_node.max_rows_per_step=256",
        "model.name=mine",
        "kv_cache.prefix_cache=False",
        "model.cuda_graphs=False",
        "decode_node.num_speculative_tokens=2",
        f"model.adapters=sql={tmp_path},law={tmp_path}",
    }


def test_names_are_texts_whatever_they_would_be_in_yaml():
    cluster = cluster_of("--served-model-name", "on", "--revision", "0123456")
    assert set(cluster.launch.overrides) >= {"model.name=on", "model.revision=0123456"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "fp8"], "flag kv_cache_dtype: KV is kept in the model's dtype"),
        (["--host", "0.0.0.0"], "services bind loopback; another address: --set server.host=ADDRESS"),
        (["--api-key", "k"], "flag api_key: clients are asked for tokens by outrider up --tls DIR --token-hashes FILE"),
        (["--quantization", "fp8"], "flag quantization: the checkpoint says how its weights are quantised"),
        (["--speculative-config", "{"], "flag speculative_config: neither a value nor JSON"),
        (["--speculative-config", '{"method": "eagl"}'], "the nearest is eagle"),
        (["--speculative-config", '{"method": "ngram"}', "--draft", "suffix"], "both choose the drafter: keep one"),
        (["--max-model-len", "-1"], "model.max_model_len = -1 is out of range"),
    ],
)
def test_flags_that_mean_nothing_here_are_refused_before_anything_starts(capsys, arguments, message):
    assert main(["up", "--port", "0", *arguments]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "starting" not in shown.out


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        cluster_of("--extra-engine-args", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "abc"], "--port: cluster.port = 'abc' is not of type int: must be at least 0 and at most 65535"),
        (["--decode-nodes", "0"], "--decode-nodes: cluster.decode_nodes = 0 is out of range: must be at least 1"),
        (["--dtype", "half"], "--dtype: model.dtype = 'half' is out of range: must be one of auto, float32, bfloat16"),
        (["--openai", ""], "--openai: a value is missing for cluster.openai_port"),
        (["--openai", "[1"], "--openai: not a value: '[1'"),
    ],
)
def test_a_wrong_value_of_a_flag_is_a_wrong_command_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as wrong:
        main(["up", *arguments])
    assert wrong.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


def test_an_empty_name_of_a_model_is_not_the_folder_we_are_in(capsys):
    for command in ("up", "fetch"):
        with pytest.raises(SystemExit):
            main([command, "--model", ""])
        assert "argument --model: a value is missing" in capsys.readouterr().err


def test_help_names_the_choices_of_a_flag(capsys):
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "--dtype {auto,float32,bfloat16}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "null", "hashes"])
def test_a_file_of_tokens_is_asked_for_whatever_its_name(name, monkeypatch, tmp_path):
    """Otherwise an unset variable after `--token-hashes` would let every caller in."""
    monkeypatch.chdir(tmp_path)
    assert f"router.token_file={tmp_path / name}" in cluster_of("--token-hashes", name).launch.overrides

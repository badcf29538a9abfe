"""Files of TensorRT-LLM, Dynamo and vLLM, as `--extra-engine-args` reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from outrider.cli.config import sections_of
from outrider.cli.main import main
from outrider.config import imports
from outrider.config.arguments import parse_role_arguments
from outrider.config.imports.translate import Kind, rules, translate
from outrider.config.resolve import load_config
from outrider.config.settings import describe_settings
from outrider.config.yaml_files import read_entries
from outrider.errors import ConfigError
from outrider.heads.locate import DEFAULT_HEAD

# The keys of Dynamo's examples for TensorRT-LLM: decode workers with EAGLE-3, and prefill workers.
DECODE = f"""\
backend: pytorch
tensor_parallel_size: 2
moe_expert_parallel_size: 1
max_batch_size: 256
max_num_tokens: 512
max_seq_len: 8704
disable_overlap_scheduler: true
enable_autotuner: false
speculative_config:
  decoding_type: Eagle
  max_draft_len: 2
  pytorch_weights_path: {DEFAULT_HEAD}
  eagle3_one_model: false
kv_cache_config:
  free_gpu_memory_fraction: 0.85
  enable_block_reuse: false
  dtype: auto
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1, 2, 4]
print_iter_log: true
cache_transceiver_config:
  backend: default
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "trt.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


def load(*imports, role=None, environ=None, overrides=(), file=None):
    return load_config(
        sections_of(role), file=file, environ=environ or {}, overrides=overrides, imports=imports, role=role
    )


def keys_of(path):
    return translate(read_entries(Path(path)))


def test_a_file_of_tensorrt_llm_is_settings(write):
    path = write(DECODE)
    resolved = load(path)
    sections = resolved.sections
    assert sections["model"].tensor_parallel_size == 2
    assert sections["model"].max_model_len == 8704
    assert sections["model"].head == str(DEFAULT_HEAD)
    assert sections["decode_node"].max_running_sequences == sections["prefill_node"].max_running_sequences == 256
    assert sections["decode_node"].max_rows_per_step == 512
    assert sections["decode_node"].num_speculative_tokens == 2
    assert sections["kv_cache"].memory == "85%"
    assert sections["kv_cache"].prefix_cache is False
    assert resolved.sources["kv_cache.memory"] == f"{path}:15 kv_cache_config.free_gpu_memory_fraction"


def test_what_a_file_asks_to_no_effect_is_named_with_its_line(write):
    path = write(DECODE)
    named = [warning.removeprefix(path).partition(": ")[0] for warning in load(path).warnings]
    assert named == [
        ":7 disable_overlap_scheduler",
        ":8 enable_autotuner",
        ":13 speculative_config.eagle3_one_model",
        ":19 cuda_graph_config.enable_padding",
        ":20 cuda_graph_config.batch_sizes",
        ":21 print_iter_log",
        ":23 cache_transceiver_config.backend",
    ]


@pytest.mark.parametrize("num_bytes", [0, 1 << 30])
def test_a_cache_in_main_memory_is_one_here(write, num_bytes):
    file = write(f"kv_cache_config: {{host_cache_size: {num_bytes}}}\n")
    assert load(file).sections["kv_cache"].host_bytes == num_bytes
    plain = write(f"kv_cache: {{host_memory: {num_bytes}}}\n", "outrider.yaml")
    assert load(file=Path(plain)).sections["kv_cache"].host_bytes == num_bytes


def test_the_flag_of_trtllm_serve_is_a_key_too(write):
    assert load(write("kv_cache_free_gpu_memory_fraction: 0.5\n")).sections["kv_cache"].memory == "50%"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_of_vllm_is_settings(write, as_json):
    keys = {
        "model": "some/model",
        "served-model-name": ["small"],
        "max-model-len": "4K",
        "max-num-seqs": 8,
        "max-num-batched-tokens": 2048,
        "gpu-memory-utilization": 0.5,
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    text = json.dumps(keys, indent=1) if as_json else "".join(f"{key}: {json.dumps(keys[key])}\n" for key in keys)
    sections = load(write(text)).sections
    assert (sections["model"].id, sections["model"].name) == ("some/model", "small")
    assert sections["model"].max_model_len == 4096
    assert sections["model"].cuda_graphs is False
    assert sections["decode_node"].max_running_sequences == 8
    assert sections["decode_node"].max_rows_per_step == 2048
    assert sections["kv_cache"].memory == "50%"
    assert sections["cluster"].draft == "ngram"
    assert sections["decode_node"].num_speculative_tokens == 3


def test_of_two_keys_for_one_setting_the_last_counts_and_the_first_is_warned_of(write):
    file = write("max_batch_size: 4\nmax_num_seqs: 8\n")
    first, last = keys_of(file)
    assert (first.kind, first.settings) == (Kind.WARNING, {})
    assert str(first).startswith(f"{file}:1 max_batch_size: max_num_seqs in {file}:2")
    assert last.kind is Kind.SET
    same = keys_of(write("max_batch_size: 8\nmax_num_seqs: 8\n"))
    assert [key.kind for key in same] == [Kind.SET, Kind.SET]


@pytest.mark.parametrize("name", ["vllm.json", "vllm.yaml"])
def test_json_may_have_tabs(write, name):
    (key,) = keys_of(write('{\n\t"max_num_seqs":\t8\n}\n', name))
    assert (key.entry.key, key.entry.value, key.entry.source.rpartition(":")[2]) == ("max_num_seqs", 8, "2")


def test_a_speculative_config_may_be_the_json_of_the_flag(write):
    path = write("""speculative-config: '{"method": "suffix", "num_speculative_tokens": 2}'\n""")
    resolved = load(path)
    assert resolved.sections["draft_node"].proposer == "suffix"
    assert resolved.sources["cluster.draft"] == f"{path}:1 speculative_config.method"


def test_environment_and_flags_override_a_file_which_overrides_our_own(write, tmp_path):
    path = write("max_batch_size: 4\nmax_num_tokens: 64\nmax_seq_len: 128\n")
    own = tmp_path / "outrider.yaml"
    own.write_text("decode_node: {max_running_sequences: 9}\n")
    resolved = load(
        path,
        file=own,
        environ={"OUTRIDER_DECODE_NODE__MAX_ROWS_PER_STEP": "32"},
        overrides=["model.max_model_len=256"],
    )
    decode = resolved.sections["decode_node"]
    assert (decode.max_running_sequences, decode.max_rows_per_step) == (4, 32)
    assert resolved.sections["model"].max_model_len == 256
    assert set(resolved.imported) == {"decode_node.max_running_sequences", "prefill_node.max_running_sequences"}


@pytest.mark.parametrize("explicit", ["cluster.draft=suffix", "model.head=", "draft_node.proposer=suffix"])
def test_who_drafts_by_flag_replaces_a_files_whole_speculation(write, explicit):
    path = write(DECODE)
    resolved = load(path, overrides=[explicit])
    assert not {key for key in resolved.imported if "draft" in key or "specul" in key}
    assert load(path, role="decode_node", overrides=[explicit]).sections["decode_node"].local_lookup == "ngram"


def test_a_file_may_be_for_one_role(write):
    prefill, decode = f"prefill={write('max_batch_size: 2', 'p.yaml')}", f"decode_node={write('max_batch_size: 3')}"
    found = {role: load(prefill, decode, role=role) for role in (None, "prefill_node", "decode_node")}
    assert found[None].imported == {}
    assert found["prefill_node"].sections["prefill_node"].max_running_sequences == 2
    assert found["decode_node"].sections["decode_node"].max_running_sequences == 3


def test_a_service_started_alone_reads_the_file_and_says_what_it_has_no_use_for(write, capsys):
    path = write("max_batch_size: 2\nmax_num_tokens: 64\n")
    arguments = ["--extra-engine-args", path, "--extra-engine-args", f"decode={path}.of-another"]
    sections = parse_role_arguments("prefill_node", sections_of("prefill_node"), arguments, environ={})
    assert sections["prefill_node"].max_running_sequences == 2
    assert (
        capsys.readouterr().err == f"prefill_node: warning: {path}:2 max_num_tokens: nothing that a prefill_node has\n"
    )


def test_mtp_takes_the_head_of_the_served_model(write, tmp_path):
    text = "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1}\n"
    for resolved in (
        load(write(text), overrides=[f"model.id={tmp_path}"]),
        load(write(f"model: {tmp_path}\n{text}")),
    ):
        assert resolved.sections["model"].head == str(tmp_path)
        assert resolved.sections["decode_node"].num_speculative_tokens == 1


def test_values_in_quotes_are_what_they_are_without_them(write):
    """Quotes mean nothing to vLLM, which turns its file into flags, and Helm and envsubst write them."""
    resolved = load(
        write(
            "max-model-len: '2048'\nmax-num-seqs: '1k'\nmax_num_batched_tokens: 25.6k\n"
            "gpu-memory-utilization: '0.5'\nenable-prefix-caching: 'off'\nenforce-eager: 'true'\n"
            "pipeline-parallel-size: '1'\nenable-lora: 'false'\nserved-model-name: 0123\nrevision: 1e5\n"
            "hf-overrides: '{}'\nspeculative-config: {method: ngram, num_speculative_tokens: '3'}\n"
        )
    )
    model, decode_node = resolved.sections["model"], resolved.sections["decode_node"]
    assert (model.max_model_len, model.cuda_graphs, model.name, model.revision) == (2048, False, "0123", "1e5")
    assert (decode_node.max_running_sequences, decode_node.max_rows_per_step) == (1000, 25_600)
    assert decode_node.num_speculative_tokens == 3
    assert resolved.sections["kv_cache"].memory == "50%"
    assert resolved.sections["kv_cache"].prefix_cache is False


@pytest.mark.parametrize(
    "text",
    [
        "enable-lora: false\nlora-modules: [sql={sql}, law={law}]\n",
        'lora_modules: [\'{{"name": "sql", "path": "{sql}", "base_model_name": "b"}}\', "law={law}"]\n',
        "lora_modules:\n- {{name: sql, path: {sql}}}\n- law={law}\n",
        "lora_paths: [{{lora_name: sql, lora_path: {sql}, pinned: true}}, law={law}]\n",
        "lora_paths: {{sql: {sql}, law: {law}}}\nmax_num_seqs: 2\n",
        "lora-paths:\n  sql: {sql}\n  law: {law}\n",
    ],
)
def test_adapters_are_named_folders(write, tmp_path, monkeypatch, text):
    folders = {name: tmp_path / name for name in ("sql", "law")}
    for folder in folders.values():
        folder.mkdir()
    expected = (f"sql={folders['sql']}", f"law={folders['law']}")
    monkeypatch.chdir(tmp_path)
    for paths in (folders, {"sql": "sql", "law": "./law"}):
        resolved = load(write(text.format(**paths)))
        assert resolved.sections["model"].adapters == expected
        assert not resolved.warnings
    assert load(write(f"lora_paths: ['{folders['sql']}']")).sections["model"].adapters == (
        f"{folders['sql']}={folders['sql']}",
    )
    for value in (
        json.dumps({"name": "sql", "path": str(folders["sql"])}),
        json.dumps({"sql": "sql"}),
        {"sql": str(folders["sql"])},
        {"name": "sql", "path": "sql"},
    ):
        assert imports.vllm_settings({"lora_modules": value}).overrides == [f"model.adapters={expected[0]}"]


def test_names_of_adapters_keep_dashes_and_dots(write, tmp_path):
    resolved = load(write(f"lora_paths:\n  my-sql: {tmp_path}\n  v1.0: {tmp_path}\n"))
    assert resolved.sections["model"].adapters == (f"my-sql={tmp_path}", f"v1.0={tmp_path}")


def test_commas_in_paths_of_adapters_are_refused(write, tmp_path):
    folder = tmp_path / "a,b"
    folder.mkdir()
    for text in (f"lora_modules: ['sql={folder}']\n", f"lora_paths: {{sql: '{folder}'}}\n"):
        with pytest.raises(ConfigError, match=r"a,b has a comma, which separates adapters: link to the folder"):
            load(write(text))


def test_switches_and_bounds_of_adapters_are_warnings(write):
    text = (
        "enable_lora: true\nmax_loras: 4\nmax_lora_rank: 64\nmax-cpu-loras: 8\nmax_loras_per_batch: 8\n"
        "fully_sharded_loras: true\n"
    )
    keys = keys_of(write(text))
    assert [key.kind for key in keys] == [Kind.WARNING] * 6
    assert "model.adapter_directory permits LoadAdapter" in keys[0].note


def test_nulls_are_defaults_but_for_groups_that_they_turn_off(write):
    resolved = load(write("max_seq_len: null\nspeculative_config: null\ncuda_graph_config:\nkv_cache_config: {}\n"))
    assert resolved.sections["model"].max_model_len == 0
    assert resolved.sections["cluster"].draft == "none"
    assert resolved.sections["model"].cuda_graphs is False
    assert not resolved.warnings


def test_true_is_not_the_number_one(write):
    text = "moe_expert_parallel_size: 1\nenable_attention_dp: true\nattention_dp_config: {enable_balance: true}\n"
    kinds = [key.kind for key in keys_of(write(text))]
    assert kinds == [Kind.SAME, Kind.WARNING, Kind.WARNING]


def test_empty_groups_are_defaults_whatever_their_keys_mean(write):
    path = write("max_num_seqs: 8\nhf_overrides: {}\nrope-scaling: {}\ncompilation-config: {}\n")
    assert [key.kind for key in keys_of(path)[1:]] == [Kind.SAME] * 3


def test_the_table_shows_no_secret(write, capsys):
    path = write("max_num_seqs: 8\napi-key: sk-private\nhf_token: hf-private\n")
    assert main(["config", "import", path]) == 1
    shown = "".join(capsys.readouterr())
    assert "api_key" in shown
    assert "set HF_TOKEN" in shown
    assert "private" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\ndata_parallel_size: 2\n", ":1 a: unknown key a"),
        ("data_parallel_size: 2\n", ":1 data_parallel_size: set cluster.decode_nodes and cluster.prefill_nodes"),
        ("max_batchsize: 2\n", ":1 max_batchsize: unknown key max_batchsize; the nearest is max_batch_size"),
        (
            "kv_cache_config:\n  free_memory_fraction: 0.5\n",
            "unknown key kv_cache_config.free_memory_fraction; the nearest is kv_cache_config.free_gpu_memory_fraction",
        ),
        ("kv_cache_config: {dtype: fp8}\n", ":1 kv_cache_config.dtype: KV is kept in the model's dtype"),
        ("kv_cache_config: {free_gpu_memory_fraction: 1}\n", "1 is not a share of the memory"),
        ("speculative_config: {decoding_type: Lookahead}\n", "speculative_config.decoding_type: Lookahead is none of"),
        ("speculative_config: {decoding_type: Eagle3, max_draft_len: 3}\n", "Eagle3 needs speculative_model_dir"),
        ("speculative_config: 3\n", ":1 speculative_config: it is a group of keys"),
        ("kv_cache_config: [0.5]\n", ":1 kv_cache_config: it is a group of keys"),
        ("max_batch_size: 0\n", ":1 max_batch_size: prefill_node.max_running_sequences = 0 is out of range"),
        ("max_seq_len: many\n", ":1 max_seq_len: model.max_model_len = 'many' is not of type int"),
        ("max_seq_len: '12.5'\n", ":1 max_seq_len: model.max_model_len = 12.5 is not of type int"),
        ("enable_prefix_caching: 'maybe'\n", "kv_cache.prefix_cache = 'maybe' is not of type bool"),
        ("served-model-name: [a, b]\n", "a model is served under one name, not 2"),
        ("host: 0.0.0.0\n", "services bind loopback"),
        ("enforce-eager: sometimes\n", "'sometimes' is neither true nor false"),
        ("lora-modules: [sql=org/sql]\n", ":1 lora_modules: sql=org/sql is not NAME=PATH of a folder: download"),
        ("lora-modules: [=.]\n", "=. is not NAME=PATH"),
        ("lora-modules: {sql: org/sql}\n", ":1 lora_modules: sql=org/sql is not NAME=PATH of a folder: download"),
        ("lora_paths.sql: .\n", "set model.adapters, a list of NAME=DIRECTORY"),
        ("max_seq_len: 1\nmax_seq_len: 2\n", ":2: max_seq_len is already set in line 1"),
        ("- 1\n", ":1: settings are needed, each as NAME: VALUE"),
        (
            "hostname: h\ncontext_servers: {num_instances: 2}\n",
            ":2: context_servers: this is the file of trtllm-serve disaggregated",
        ),
        ("Common: {model: m}\nFrontend: {port: 1}\n", ":1: Common: this is a graph of Dynamo"),
        ("apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\n", ":1: apiVersion: this is a Kubernetes"),
        ("servingEngineSpec: {modelSpec: []}\n", "this is a file of values of a Helm chart"),
        ("services: {vllm: {image: x}}\n", "this is a Compose file"),
        ("decode_node: {max_running_sequences: 3}\n", "this is a configuration file of ours: give it to --config"),
        ("a: [\n", "not YAML"),
        ("a: &a {b: *a}\n", "a.b contains itself"),
        ("speculative-config: '{'\n", ":1 speculative_config: neither a value nor JSON: '{'"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", ":2: max_num_seqs is already set in line 1"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_with_line_and_key(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert path in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_further_errors_are_counted(write):
    with pytest.raises(ConfigError, match=r"\(and 1 more, which `outrider config import` lists\)"):
        load(write("max_beam_width: 4\ntokenizer: other\n"))


@pytest.mark.parametrize("text", ["", "{}\n"])
def test_an_empty_file_says_nothing(write, text):
    assert keys_of(write(text)) == []


def test_the_table_names_settings_that_there_are():
    known = {info.key for info in describe_settings(sections_of(None))}
    assert {key for rule in rules().values() for key in rule.to} <= known
    for rule in rules().values():
        assert rule.note or rule.to, "what is refused or ignored says why"
        assert bool(rule.to) is (rule.kind is Kind.SET)


def test_the_table_names_each_key_once():
    table = yaml.safe_load(Path(imports.__file__).with_name("keys.yaml").read_text())
    keys = [key for kind in ("set", "error", "warning") for item in table[kind] for key in item["keys"]]
    assert sorted(keys) == sorted(set(keys))

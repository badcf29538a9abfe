from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from outrider.cli.config import ROLES, sections_of
from outrider.cli.main import main
from outrider.config.resolve import load_config
from outrider.config.schema import config_schema
from outrider.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
SECTIONS = sections_of(None)
VALIDATOR = jsonschema.Draft202012Validator(config_schema(SECTIONS))


def examples():
    """Yields (name, text) of Outrider's own configuration files and of those that the documents show."""
    yield "deploy/outrider.yaml", (ROOT / "deploy" / "outrider.yaml").read_text()
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        for number, text in enumerate(FENCE.findall(page.read_text())):
            if set(yaml.safe_load(text)) <= set(SECTIONS):
                yield f"{page.name}-{number}", text


EXAMPLES = dict(examples())


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_files_conform(name):
    VALIDATOR.validate(yaml.safe_load(EXAMPLES[name]))


def test_the_documents_have_examples():
    assert len(EXAMPLES) > 1


@pytest.mark.parametrize("role", [None, *ROLES])
def test_the_settings_in_force_conform(role, capsys, monkeypatch):
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)
    flags = [] if role is None else ["--role", role]
    assert main(["config", *flags, "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert main(["config", *flags]) == 0
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(capsys.readouterr().out))


@pytest.mark.parametrize(
    "text",
    [
        "decode_node: {max_runing_sequences: 3}",
        "decode_nodes: {}",
        "decode_node: {max_running_sequences: 0}",
        "decode_node: {max_running_sequences: true}",
        "model: {dtype: int8}",
        "model: {cpus: [0, one]}",
        "router: {tls: {certificat: x}}",
        "router: 3",
    ],
)
def test_what_loading_refuses_the_schema_refuses(text, tmp_path):
    file = tmp_path / "outrider.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_config(SECTIONS, file=file, environ={})
    assert not VALIDATOR.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("text", ["model:", "server: {metrics_port: null}", "model: {cpus: [0, 1]}", ""])
def test_what_loading_takes_the_schema_takes(text):
    assert VALIDATOR.is_valid(yaml.safe_load(text))


def test_every_setting_is_described():
    for name, section in VALIDATOR.schema["properties"].items():
        for key, setting in section["properties"].items():
            assert setting.get("description") or "properties" in setting, f"{name}.{key}"

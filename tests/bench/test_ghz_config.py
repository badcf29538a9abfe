"""ghz's configs and reports as bench reads them; the shipped ones among them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from outrider.bench.ghz import fill_in, load_ghz_config, load_ghz_report
from outrider.bench.prompts import AnswerOptions
from outrider.errors import InvalidRequestError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "benchmarks" / "ghz").glob("*.json"))
CALL = "outrider.v1.RouterService.Generate"


@pytest.fixture
def write(tmp_path):
    def write(**fields):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"call": CALL, "data": {"text": "a"}, **fields}))
        return file

    return write


def messages_of(config, **options):
    """[(message, metadata)] of a whole run."""
    options = {"speculation": True, **options}
    return [request.to_message(AnswerOptions(), index=0, **options) for request in config.requests()]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_is_two_hundred_calls_at_sixteen(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_ghz_config(path)
    assert (config.total, config.concurrency) == (200, 16)
    assert (config.host, config.tls) == ("127.0.0.1:50051", None)
    messages = [message for message, _ in messages_of(config)]
    assert len(messages) == 200
    prompts = [message.SerializeToString() for message in messages if message.WhichOneof("prompt") != "token_ids"]
    assert len(set(prompts)) == len(prompts), "each prompt is marked with its number"
    assert all(message.sampling.max_tokens <= 64 for message in messages)


def test_the_shipped_configs_cover_both_calls_and_every_kind_of_prompt(monkeypatch):
    monkeypatch.chdir(ROOT)
    configs = {path.stem: load_ghz_config(path) for path in SHIPPED}
    assert {name: config.call.rpartition(".")[2] for name, config in configs.items()} == {
        "complete": "Complete", "generate": "Generate", "mixed": "Generate",
    }  # fmt: skip
    mixed = [message for message, _ in messages_of(configs["mixed"])]
    assert {message.WhichOneof("prompt") for message in mixed} == {"text", "chat", "token_ids"}
    assert configs["complete"].templates == configs["generate"].templates


def test_requests_take_their_turn_and_their_number_as_with_ghz(write):
    config = load_ghz_config(
        write(
            data=[
                {"text": "a {{.RequestNumber}}", "sampling": {"seed": "{{ .RequestNumber }}"}},
                {"text": "b", "speculation": {"num_speculative_tokens": 2}},
            ],
            metadata={"X-Number": "{{.RequestNumber}}"},
            total=3,
        )
    )
    (first, _), (second, metadata), (third, _) = messages_of(config)
    assert [first.text, second.text, third.text] == ["a 0", "b", "a 2"]
    assert (third.sampling.seed, metadata) == (2, (("x-number", "1"),))
    assert not second.speculation.HasField("enabled"), "the config decides"
    assert not any(message.speculation.enabled for message, _ in messages_of(config, speculation=False))


def test_what_changes_with_time_is_filled_in_when_a_request_is_sent():
    assert abs(int(fill_in("{{.TimestampUnix}}", 7)) - time.time()) < 5
    assert re.fullmatch(r"[0-9a-f-]{36}", fill_in("{{.UUID}}", 7))
    assert fill_in("{{.UUID}}", 7) != fill_in("{{.UUID}}", 7)


def test_paths_defaults_and_durations_are_ghzs(write, tmp_path, monkeypatch):
    (tmp_path / "data.json").write_text('[{"text": "x"}, {"text": "y"}]')
    monkeypatch.chdir(tmp_path)
    config = load_ghz_config(write(data=None, **{"data-file": "data.json"}, timeout="1m30.5s"))
    assert (config.total, config.concurrency, config.timeout_seconds) == (200, 50, 90.5)
    assert len(config.templates) == 2
    assert load_ghz_config(write(call="outrider.v1.RouterService/Complete")).call.endswith(".Complete")


BAD = [
    ({"totl": 5}, "totl: no such setting of ghz; did you mean 'total'?"),
    ({"rps": 5}, "rps: bench cannot drive that as ghz does; leave it out of the config"),
    ({"call": "outrider.v1.RouterService.Abort"}, "call: 'outrider.v1.RouterService.Abort' is not one of"),
    ({"call": None}, "call: is missing"),
    ({"total": 0}, "total: needs a whole number, at least 1, not 0"),
    ({"concurrency": "8"}, 'concurrency: needs a whole number, at least 1, not "8"'),
    ({"timeout": "fast"}, "timeout: needs a duration such as '90s' or '2m30s', not 'fast'"),
    ({"data": []}, "data: needs a request as a JSON object, or a list of them"),
    ({"data": "text"}, "data: needs a request as a JSON object"),
    ({"data": [{"text": "a"}, {"txt": "b"}]}, 'data[1]: Message type "outrider.v1.GenerateRequest" has no field named'),
    ({"data": {"text": "{{randomInt 1 5}}"}}, "data[0]: bench cannot fill in {{randomInt 1 5}}; it knows {{.Req"),
    ({"data-file": "nowhere.json"}, "data-file: no file 'nowhere.json' in "),
    ({"metadata": {"a": 1}}, "metadata: needs a JSON object of texts"),
    ({"metadata": {"a": "{{.Nothing}}"}}, "metadata: bench cannot fill in {{.Nothing}}"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_config_is_named_by_file_and_field_with_the_fix(write, fields, message):
    file = write(**fields)
    with pytest.raises(InvalidRequestError) as caught:
        load_ghz_config(file)
    assert f"{file}: {message}" in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "a config is a JSON object")])
def test_a_file_that_is_no_config_is_named(tmp_path, text, message):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=rf"config\.json: {message}"):
        load_ghz_config(file)
    with pytest.raises(InvalidRequestError, match=r"nowhere\.json: No such file"):
        load_ghz_config(tmp_path / "nowhere.json")


def test_a_report_of_ghz_is_read(tmp_path):
    file = tmp_path / "report.json"
    latencies = [{"percentage": share, "latency": share * 10**6} for share in (10, 25, 50, 75, 90, 95, 99)]
    value = {"count": 40, "rps": 8.25, "errorDistribution": {"a": 2, "b": 1}, "latencyDistribution": latencies}
    file.write_text(json.dumps(value))
    report = load_ghz_report(file)
    assert (report.num_requests, report.num_errors, report.requests_per_second) == (40, 3, 8.25)
    assert (report.e2e_seconds.p50, report.e2e_seconds.p99) == (0.05, 0.099)
    file.write_text(json.dumps({**value, "latencyDistribution": None, "errorDistribution": None}))
    assert load_ghz_report(file).e2e_seconds is None
    file.write_text("{}")
    with pytest.raises(InvalidRequestError, match=r"report\.json is no report of ghz .* --format json --output"):
        load_ghz_report(file)

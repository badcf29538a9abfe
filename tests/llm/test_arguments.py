"""How vLLM's arguments and parameters are converted, and the errors for those that are not supported."""

from __future__ import annotations

import json

import pytest

import outrider
from outrider import LLM, SamplingParams, StructuredOutputsParams
from outrider.client.options import make_request
from outrider.v1 import router_pb2
from tests.support.processes import run_python


def request_of(params):
    return make_request("a", params.to_options())


def test_importing_the_package_is_cheap_and_its_names_are_there():
    program = (
        "import sys, outrider; print({'grpc', 'torch', 'yaml'} & set(sys.modules)); "
        "from outrider import SamplingParams; SamplingParams(); print({'grpc', 'torch'} & set(sys.modules)); "
        "from outrider import LLM; print({'torch', 'transformers'} & set(sys.modules))"
    )
    shown = run_python("-c", program)
    assert shown.stdout == "set()\n" * 3, shown.stderr
    for name in outrider._OFFLINE:
        assert getattr(outrider, name).__name__ == name
    with pytest.raises(ImportError, match="BeamSearchParams"):
        from outrider import BeamSearchParams  # noqa: F401


def test_the_defaults_are_those_of_vllm():
    request = request_of(SamplingParams())
    assert request.sampling == router_pb2.SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, n=1,
        max_tokens=16, min_tokens=0,
    )  # fmt: skip
    assert request.stop == router_pb2.StopConditions()
    assert request.output == router_pb2.OutputOptions(skip_special_tokens=True)


def test_parameters_are_those_of_the_contract():
    request = request_of(
        SamplingParams(
            n=2,
            temperature=0.5,
            top_k=-1,
            seed=3,
            stop="x",
            stop_token_ids=[4],
            ignore_eos=True,
            max_tokens=None,
            min_tokens=2,
            logprobs=0,
            prompt_logprobs=5,
            detokenize=False,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            logit_bias={7: 1.5},
            bad_words=[],
        )
    )
    assert (request.sampling.n, request.sampling.temperature, request.sampling.top_k) == (2, 0.5, 0)
    assert (request.sampling.seed, request.sampling.min_tokens) == (3, 2)
    assert not request.sampling.HasField("max_tokens")
    assert dict(request.sampling.logit_bias) == {7: 1.5}
    assert request.stop == router_pb2.StopConditions(strings=["x"], token_ids=[4], ignore_eos=True, include_match=True)
    assert request.output == router_pb2.OutputOptions(
        top_logprobs=0, prompt_logprobs=5, skip_special_tokens=False, token_ids_only=True
    )


SCHEMA = {"type": "integer"}


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"choice": ["a", "b"]}, "choice", router_pb2.Choice(options=["a", "b"])),
    ],
)
def test_structured_outputs_are_the_constraint_of_the_contract(constraint, field, value):
    for name in ("structured_outputs", "guided_decoding"):
        sampling = request_of(SamplingParams(**{name: StructuredOutputsParams(**constraint)})).sampling
        assert sampling.WhichOneof("constraint") == field
        assert getattr(sampling, field) == value


@pytest.mark.parametrize(
    "constraint", [{}, {"regex": "a", "choice": ["b"]}, {"json_object": False}, {"json_object": True, "json": "{}"}]
)
def test_a_constraint_is_exactly_one(constraint):
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams(**constraint)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(bad_words=["x"]), r"SamplingParams.bad_words=\['x'\] is not supported: use logit_bias"),
        (lambda: SamplingParams(spaces_between_special_tokens=False), "spaces_between_special_tokens=False"),
        (lambda: SamplingParams(best_of=2), "generate n samples"),
        (lambda: StructuredOutputsParams(regex="a", structural_tag="b"), "StructuredOutputsParams.structural_tag"),
        (lambda: SamplingParams(logprobs=-1).to_options(), "logprobs must be 0 to 20"),
        (lambda: SamplingParams(prompt_logprobs=-1).to_options(), "prompt_logprobs must be 0 to 20"),
    ],
)
def test_a_parameter_without_an_equivalent_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_parameter_that_is_assigned_later_is_checked_too():
    params = SamplingParams()
    params.bad_words = ["x"]
    with pytest.raises(ValueError, match="bad_words"):
        params.to_options()


def test_arguments_are_settings_of_the_cluster(router, clusters):
    with LLM(
        "/models/m",
        draft="none",
        max_model_len=64,
        max_num_seqs=3,
        dtype="float32",
        settings={"cluster.decode_nodes": 2},
    ):
        pass
    config, launch = clusters[0].config, clusters[0].launch
    assert (config.draft, config.decode_nodes, config.port) == ("none", 2, 0)
    assert set(launch.overrides) >= {
        "model.id=/models/m", "model.max_model_len=64", "decode_node.max_running_sequences=3", "model.dtype=float32",
    }  # fmt: skip


def test_no_gateway_is_started_for_a_file_or_variable_of_outrider_up(router, clusters, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CLUSTER__OPENAI_PORT", "8000")
    LLM().close()
    assert clusters[0].config.openai_port is None


def test_memory_is_divided_among_the_nodes_unless_it_is_vllm_s_default(router, clusters):
    LLM(gpu_memory_utilization=0.85).close()
    assert clusters[0].launch.node_overrides == {
        "prefill-0": ("kv_cache.memory=25%",),
        "decode-0": ("kv_cache.memory=60%",),
    }
    LLM(gpu_memory_utilization=0.9).close()
    assert not any(override.startswith("kv_cache") for override in clusters[1].launch.overrides)


def test_what_concerns_speed_only_is_a_warning(router, clusters):
    with pytest.warns(UserWarning, match="trust_remote_code: code of checkpoints never runs"):
        LLM(trust_remote_code=True, tokenizer=None, quantization="awq", enforce_eager=True).close()
    assert "model.cuda_graphs=False" in clusters[0].launch.overrides


def test_a_speculative_config_is_what_outrider_config_import_makes_of_it(router, clusters):
    with pytest.warns(UserWarning, match="prompt_lookup_max"):
        LLM(speculative_config={"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_max": 4}).close()
    assert clusters[0].config.draft == "suffix"
    assert "decode_node.num_speculative_tokens=3" in clusters[0].launch.overrides


def test_wrong_arguments_are_named(llm, clusters):
    with pytest.raises(ValueError, match=r"LLM\(\) quantization: the checkpoint says how its weights are quant"):
        LLM(quantization="fp8")
    with pytest.raises(ValueError, match=r"quantisation.*nearest is quantization"):
        LLM(quantisation="awq")
    with pytest.raises(ValueError, match=r"LLM\(\) port: an LLM does not serve HTTP"):
        LLM(port=8000)
    with pytest.raises(ValueError, match=r"model.dtype = 'half' .* float32, bfloat16"):
        LLM(dtype="half")
    with pytest.raises(ValueError, match=r"cluster.draft.*eagle"):
        LLM(draft="eagle")
    with pytest.raises(ValueError, match="eagle needs model, the folder of a head"):
        LLM(speculative_config={"method": "eagle"})
    with pytest.raises(ValueError, match=r"speculative_config and --set cluster.draft=ngram both choose the drafter"):
        LLM(draft="ngram", speculative_config=None)
    assert len(clusters) == 1


@pytest.mark.parametrize("key", ["router.token_file", "router.tls.certificate", "security.tls.authority"])
def test_a_router_that_would_refuse_the_requests_is_not_started(router, clusters, monkeypatch, tmp_path, key):
    with pytest.raises(ValueError, match=f"--set {key}=x: .* without a token"):
        LLM(settings={key: "x"})
    value = "x"
    for name in reversed(key.split(".")):
        value = {name: value}
    file = tmp_path / "outrider.yaml"
    file.write_text(json.dumps(value))
    monkeypatch.setenv("OUTRIDER_CONFIG", str(file))
    with pytest.raises(ValueError, match=f"{file}:1: .* {key} .*null"):
        LLM()
    assert clusters == []
    LLM(settings={key: "null"}).close()
    assert f"{key}=null" in clusters[0].launch.overrides


def test_arguments_of_generate_and_chat_pass_at_their_defaults_only(llm):
    llm.generate("a", lora_request=None, priority=None)
    llm.chat([{"role": "user", "content": "a"}], tools=None, chat_template_content_format="auto")
    with pytest.raises(ValueError, match=r"chat_template.*apply_chat_template"):
        llm.chat([{"role": "user", "content": "a"}], chat_template="x")
    with pytest.raises(ValueError, match="pass token ids as prompts"):
        llm.generate(prompt_token_ids=[[1]], prompts=None)
    with pytest.raises(TypeError, match="'temperature'"):
        llm.generate("a", temperature=1)

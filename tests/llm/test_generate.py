"""`LLM.generate` and `LLM.chat` with a fake router."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from outrider import LLM, Logprob, SamplingParams
from outrider.llm import llm as llm_module
from tests.llm.scripted_router import WINDOW

SHORT = SamplingParams(max_tokens=50)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_answers_come_in_the_order_of_their_prompts(llm, router):
    prompts = [f"prompt {index}" for index in range(40)]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert texts(outputs) == [prompt.upper() for prompt in prompts]
    assert [output.request_id for output in outputs] == [str(index) for index in range(40)]
    assert all(output.finished and output.prompt_token_ids == list(map(ord, output.prompt)) for output in outputs)


@pytest.mark.parametrize(
    ("prompts", "prompt"),
    [
        ("abc", "abc"),
        ([97, 98, 99], None),
        ({"prompt": "abc"}, "abc"),
        ({"prompt_token_ids": [97, 98, 99]}, None),
        ({"prompt_token_ids": [97, 98, 99], "prompt": "shown", "multi_modal_data": None}, "shown"),
        ([[97, 98, 99]], None),
        (("abc",), "abc"),
        (np.array([97, 98, 99]), None),
        ([np.array([97, 98, 99])], None),
    ],
)
def test_a_prompt_has_any_of_its_forms(llm, prompts, prompt):
    (output,) = llm.generate(prompts, SHORT)
    assert output.prompt == prompt
    assert output.prompt_token_ids == [97, 98, 99]
    assert output.outputs[0].text == "ABC"
    assert output.num_cached_tokens == 1


def test_no_prompts_have_no_answers(llm):
    assert llm.generate([]) == []


def test_conversations_are_rendered_by_the_model(llm):
    hello, parts = {"role": "user", "content": "hello"}, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (single,) = llm.chat([hello], SHORT)
    assert single.prompt == "<user>hello<assistant>"
    conversations = [[hello], [{"role": "system", "content": ""}, {"role": "user", "content": parts, "name": None}]]
    outputs = llm.chat(conversations, SHORT, add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["<user>hello", "<system><user>a\nb"]


def test_each_prompt_may_have_its_parameters(llm):
    outputs = llm.generate(["one", "two"], [SamplingParams(n=2), SamplingParams(max_tokens=1)])
    assert [len(output.outputs) for output in outputs] == [2, 1]
    assert [output.outputs[-1].index for output in outputs] == [1, 0]
    assert outputs[1].outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["one", "two"], [SamplingParams()])


def test_an_answer_ends_at_the_window_whatever_it_may_have(llm, router):
    llm.generate("a" * 90, [SamplingParams(max_tokens=1000)])
    llm.generate("a" * 90, [SamplingParams(max_tokens=None)])
    assert [request.sampling.max_tokens for request in router.requests] == [WINDOW - 90] * 2


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(), None),  # the model's own end-of-text
        (SamplingParams(stop="x"), "x"),
        (SamplingParams(stop=["x", "y"]), "x"),
        (SamplingParams(stop_token_ids=[7]), 7),
    ],
)
def test_the_reason_of_a_stop_is_what_matched(llm, params, reason):
    (completion,) = llm.generate("abc", params)[0].outputs
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == reason


def test_logprobs_are_tables_by_token(llm):
    (output,) = llm.generate("ab", SamplingParams(logprobs=1, prompt_logprobs=2))
    (completion,) = output.outputs
    assert completion.logprobs == [
        {ord("A"): Logprob(-1.0, 2, "A"), 1: Logprob(-0.25, 1, "\x01")},
        {ord("B"): Logprob(-1.0, 2, "B"), 1: Logprob(-0.25, 1, "\x01")},
    ]
    assert completion.cumulative_logprob == -2.0
    assert output.prompt_logprobs == [None, {ord("b"): Logprob(-0.5, 1, "b"), 1: Logprob(-1.5, 2, "\x01")}]
    (plain,) = llm.generate("ab", SamplingParams(detokenize=False, logprobs=0))
    assert plain.outputs[0].logprobs[0][ord("A")] == Logprob(-1.0, 2, None)
    assert plain.prompt_logprobs is None
    (without,) = llm.generate("ab")
    assert without.outputs[0].logprobs is without.outputs[0].cumulative_logprob is None


def test_a_script_draws_the_same_seeds_each_time_unless_it_wants_others(router, clusters):
    def seeds_of(**arguments):
        router.requests.clear()
        with LLM(**arguments) as llm:
            llm.generate(["a", "b"], use_tqdm=False)
            llm.generate("c", SamplingParams(seed=5), use_tqdm=False)
        return [
            request.sampling.seed if request.sampling.HasField("seed") else None
            for request in sorted(router.requests, key=lambda request: int(request.request_id))
        ]

    first = seeds_of()
    assert first == seeds_of(seed=0)
    assert first[0] != first[1]
    assert first[2] == 5
    assert seeds_of(seed=1)[:2] != first[:2]
    assert seeds_of(seed=None) == [None, None, 5]


def test_requests_wait_for_room_however_often_they_are_refused(llm, router):
    router.full = 5  # one more than a client's own attempts
    assert texts(llm.generate("a")) == ["A"]
    assert router.full == 0


def test_no_more_than_the_nodes_have_room_for_and_some_that_wait_are_sent_at_once(router, clusters, monkeypatch):
    monkeypatch.setattr(llm_module, "NUM_WAITING", 1)
    with LLM() as llm:
        llm.generate(["a"] * 60)
    assert 1 <= router.max_concurrent <= 3


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["ok", "a" * WINDOW], r"prompts\[1\]: the prompt has 100 tokens; a window of 100 allows 1 to 99"),
        (["ok", ""], r"prompts\[1\]: the prompt has 0 tokens"),
        (["ok", {"multi_modal_data": 1}], r"prompts\[1\]: a prompt must have the key .*, not 'multi_modal_data'"),
        (["ok", {}], r"prompts\[1\]: .* not an empty dict"),
        (["ok", None], r"prompts\[1\]: a prompt must be text, token ids or a dict, not None"),
        (["ok", ["a", 1]], r"prompts\[1\]: .* not \['a', 1\]"),
        (["ok", {"prompt": 5}], r"prompts\[1\]: a prompt must be text, token ids or a dict, not 5"),
    ],
)
def test_a_prompt_that_cannot_be_is_named_before_anything_is_generated(llm, router, prompts, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts)
    assert router.requests == []


@pytest.mark.parametrize("message", [{"content": "a"}, "hello"])
def test_a_message_that_is_not_text_is_refused(llm, message):
    with pytest.raises(ValueError, match=r"messages\[0\]: a message must "):
        llm.chat([message])


def test_parameters_that_the_router_refuses_are_named_and_end_the_batch(llm, router):
    with pytest.raises(ValueError, match=r"prompts\[1\]: temperature is at least 0"):
        llm.generate(["hold", "b"], [SamplingParams(), SamplingParams(temperature=-1)])
    router.wait_held(0)
    assert texts(llm.generate("again", SHORT)) == ["AGAIN"]


class InterruptedBar:
    """A progress bar that simulates Ctrl-C when one of three answers is complete and the others are running."""

    def __init__(self, router, *, total, desc, **options):
        self._is_answers = total == 3 and desc == "Processed prompts"
        self._router = router

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def set_postfix_str(self, shown, **options):
        assert "mean acceptance length 2.50" in shown

    def update(self, number=1):
        if self._is_answers:
            self._router.wait_held(2)
            raise KeyboardInterrupt


def test_ctrl_c_stops_what_runs_and_the_llm_goes_on(llm, router):
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hold", "a", "hold"], use_tqdm=lambda **options: InterruptedBar(router, **options))
    router.wait_held(0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outrider-llm")]
    assert texts(llm.generate(["a", "b"])) == ["A", "B"]


@pytest.mark.parametrize(("use_tqdm", "is_shown"), [(True, True), (False, False)])
def test_progress_is_shown_unless_it_is_not_wanted(llm, capsys, use_tqdm, is_shown):
    llm.generate(["a", "b"], SHORT, use_tqdm)
    assert ("tokens/s, mean acceptance length 2.50" in capsys.readouterr().err) == is_shown


def test_a_closed_llm_says_so(llm, clusters):
    llm.close()
    llm.close()
    assert clusters[0].num_stops == 1
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_ctrl_c_while_it_closes_ends_the_processes_at_once(llm, clusters):
    clusters[0].is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert clusters[0].was_killed
    assert clusters[0].num_stops == 2
    llm.close()


def test_an_llm_that_nobody_holds_any_more_ends_its_processes(router, clusters):
    LLM().generate("a")
    gc.collect()
    assert clusters[0].num_stops == 1

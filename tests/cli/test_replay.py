"""`outrider replay` against a router with fake nodes, whose tokens are scripted."""

from __future__ import annotations

import json
import time

import pytest

from outrider.cli.main import main
from outrider.client import Client
from tests.router.threaded_router import ThreadedRouter
from tests.support.router_fakes import letters

WAIT_SECONDS = 60.0
PROMPT = list(b"prompt")
START = len(PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "receipts"


@pytest.fixture(scope="module")
def router(folder):
    router = ThreadedRouter(receipts=str(folder))
    yield router
    router.stop()


@pytest.fixture(scope="module")
def client(router):
    with Client(router.cluster.address) as client:
        yield client


@pytest.fixture
def decode(router):
    node = router.cluster.decode
    yield node
    node.script, node.step_seconds, node.opened[:] = letters, 0.0, []


@pytest.fixture
def answered(client, folder, tmp_path):
    """answer(id, …) → (path of the answer's receipt, which `change` may alter; tokens by sample)."""

    def answer(request_id, *, prompt=PROMPT, change=None, **options):
        options = {"max_tokens": 12, "temperature": 0.0, "seed": 7} | options
        result = client.complete(prompt, request_id=request_id, **options)
        fields = wait_for_receipt(folder, request_id)
        if change is not None:
            change(fields)
        path = tmp_path / "receipt.jsonl"
        path.write_text(json.dumps(fields) + "\n")
        return path, [list(completion.token_ids) for completion in result.completions]

    return answer


def wait_for_receipt(folder, request_id):
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        for path in folder.glob("*.jsonl"):
            for line in path.read_bytes().splitlines():
                if (fields := json.loads(line))["request_id"] == request_id:
                    return fields
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def replay(router, capsys):
    """replay(*arguments) runs the command; returns (exit status, standard output, standard error)."""

    def run(*arguments):
        status = main(["replay", f"--against={router.cluster.address}", *map(str, arguments)])
        shown = capsys.readouterr()
        out = [line for line in shown.out.splitlines(keepends=True) if " component=" not in line]  # the router's log
        return status, "".join(out), shown.err

    return run


def test_an_answer_is_found_by_its_id_and_replayed_as_it_was_asked_for(replay, answered, folder, decode):
    answered("found", n=2, temperature=0.9, priority=3, resume_window_seconds=0.0, top_p=0.5, stop=["zz"])
    status, out, err = replay("found", f"--receipts={folder}")
    assert (status, out, err) == (0, "found: identical: 24 tokens, 2 samples\n", "")
    first, again = decode.opened
    assert again.options.num_speculative_tokens == 0
    assert again.options.priority == 0
    assert again.options.sampling == first.options.sampling
    assert again.prompt_token_ids == first.prompt_token_ids
    assert again.request_id != first.request_id


def test_receipts_are_where_the_settings_say(replay, answered, folder, tmp_path, monkeypatch):
    answered("by-settings")
    assert replay("by-settings", "--set", f"router.receipts={folder}")[0] == 0
    monkeypatch.setenv("OUTRIDER_ROUTER__RECEIPTS", str(folder))
    assert replay("by-settings")[0] == 0
    status, _, err = replay("unheard-of")
    assert (status, err) == (1, f"outrider replay: there is no receipt of request 'unheard-of' in {folder}\n")
    monkeypatch.delenv("OUTRIDER_ROUTER__RECEIPTS")
    status, _, err = replay("by-settings")
    assert status == 1
    assert "set router.receipts or --receipts" in err


def test_the_first_difference_of_each_sample_is_shown_and_the_request_stopped(replay, answered, decode, router):
    path, tokens = answered("moved", n=2, max_tokens=400)

    def another(opened, sample):
        script = list(letters(opened, sample))
        script[5 + sample] = 65 + sample
        return script

    decode.script, decode.step_seconds = another, 0.01
    status, out, _ = replay(path)
    assert status == 1
    shown = out.splitlines()
    assert shown[0] == "moved: different in 2 of 2 samples"
    for sample in range(2):
        index = 5 + sample
        expected = f"{tokens[sample][index]} '{chr(tokens[sample][index])}'"
        assert shown[1 + sample] == (
            f"  sample {sample}, position {START + index} (generated token {index}): expected {expected}, "
            f"computed {65 + sample} '{chr(65 + sample)}'; gap between the two best logprobs there: 1.00e+00"
        )
    assert shown[3] == (
        "  numerics and versions of the nodes are the same: decode-0 decode fake exact (fake), "
        "prefill-0 prefill fake exact (fake)"
    )
    assert shown[4].startswith("replay: receipts=1 identical=0 different=1")
    router.run(router.cluster.is_empty())
    assert decode.cancelled, "it was not computed to its end"


def tampered(index, token_id):
    return lambda fields: fields["samples"][0]["token_ids"].__setitem__(index, token_id)


def test_a_receipt_that_was_tampered_with_differs_where_it_was(replay, answered):
    path, tokens = answered("tampered", change=tampered(4, 33))
    status, out, _ = replay(path)
    assert status == 1
    assert f"position {START + 4} (generated token 4): expected 33 '!', computed {tokens[0][4]}" in out


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda tokens: tokens.pop(), "(generated token 11): expected the end, computed"),
        (lambda tokens: tokens.append(1 << 31), "(generated token 12): expected 2147483648, computed the end"),
    ],
    ids=["shorter", "longer"],
)
def test_an_answer_that_ends_elsewhere_differs(replay, answered, change, shown):
    path, _ = answered(f"end-{shown[-8:]}", change=lambda fields: change(fields["samples"][0]["token_ids"]))
    status, out, _ = replay(path)
    assert status == 1
    assert shown in out


def cut(fields):
    fields["end"] = "aborted"
    fields["samples"][0]["finish_reason"] = "aborted"
    del fields["samples"][0]["token_ids"][6:]


def test_the_tokens_of_an_aborted_answer_are_compared_as_far_as_they_go(replay, answered, decode):
    path, _ = answered("aborted", change=cut, max_tokens=400)
    decode.step_seconds = 0.005
    status, out, _ = replay(path)
    assert status == 0
    assert out.startswith("aborted: identical: 6 tokens, 1 sample of an answer that was aborted\n")
    assert decode.cancelled


def test_a_stop_string_of_special_tokens_is_looked_for_again(replay, answered, decode):
    decode.script = lambda opened, sample: [*b"ab", 258, *b"cdefgh"]
    path, tokens = answered("shown", stop=["<|end|>"], skip_special_tokens=False)
    assert tokens == [[*b"ab", 258]]
    assert replay(path)[:2] == (
        0,
        "shown: identical: 3 tokens, 1 sample\nreplay: receipts=1 identical=1 different=0 not_replayable=0\n",
    )


def emptied(fields):
    fields["end"], fields["error"] = "failed", "NO_NODE"
    fields["samples"][0] |= {"finish_reason": "", "token_ids": []}


def test_an_answer_without_tokens_is_not_called_identical(replay, answered, decode):
    path, _ = answered("empty", change=emptied)
    status, out, _ = replay(path)
    assert (status, out.splitlines()[0]) == (3, "empty: cannot be replayed: it has no tokens to compare")
    assert len(decode.opened) == 1


def test_a_continued_answer_goes_on_from_its_position(replay, answered, decode):
    path, _ = answered("continued", generated_token_ids=list(b"abc"))
    assert replay(path)[0] == 0
    assert decode.opened[1].samples[0].generated_token_ids == tuple(b"abc")


@pytest.mark.parametrize(("method", "label"), [("rejection", "rejection"), ("typical", "typical (lossy)")])
def test_answers_that_depend_on_drafts_cannot_be_replayed(replay, answered, decode, method, label):
    path, _ = answered(method, verification_method=method, temperature=1.0)
    status, out, _ = replay(path)
    assert status == 3
    assert f"{method}: cannot be replayed: its drafts were verified by {label}, so that" in out
    assert len(decode.opened) == 1
    path, _ = answered(f"{method}-greedy", verification_method=method)  # at temperature 0 all methods agree
    assert replay(path)[0] == 0


def test_answers_to_blended_prompts_cannot_be_replayed(replay, answered, decode):
    path, _ = answered("blended", blend_piece_lengths=[2, 16], prompt=[*range(20)])
    status, out, _ = replay(path)
    assert status == 3
    assert "blended: cannot be replayed: its prompt may have been blended, so that" in out
    assert len(decode.opened) == 1


def test_another_model_is_refused(replay, answered):
    path, _ = answered("elsewhere", change=lambda fields: fields["model"].update(fingerprint="0" * 64))
    status, out, _ = replay(path)
    assert status == 1
    assert f"fingerprint {'0' * 64}; the served model, fake-model in float32 with fingerprint {'f' * 64}, is" in out


def test_a_difference_is_expected_of_inexact_numerics_and_what_changed_is_named(replay, answered):
    def change(fields):
        tampered(0, 33)(fields)
        fields["nodes"][0].update(numerics="batch-dependent (cuda bfloat16)", version="0.1")

    path, _ = answered("inexact", change=change)
    status, out, err = replay(path)
    assert status == 1
    assert "a difference is to be expected, as the numerics were batch-dependent (cuda bfloat16)" in err
    assert (
        "numerics then: decode batch-dependent (cuda bfloat16), prefill exact (fake); now: decode exact (fake)" in out
    )
    assert "version then: decode 0.1, prefill fake; now: decode fake, prefill fake" in out


def test_what_a_receipt_says_is_not_for_a_terminal_to_obey(replay, answered):
    def change(fields):
        tampered(0, 33)(fields)
        fields["request_id"] = "\x1b[2J"
        fields["nodes"][0].update(version="\x9b1m", numerics="\x1b[31m")

    status, out, err = replay(answered("escape", change=change)[0])
    assert status == 1
    assert "?[2J: different" in out
    assert not {"\x1b", "\x9b"} & set(out + err)


def test_every_receipt_of_a_file_is_replayed_and_counted(replay, answered, folder, tmp_path):
    paths = [answered("one"), answered("two", change=tampered(1, 33))]
    path = tmp_path / "several.jsonl"
    fields = wait_for_receipt(folder, "one"), json.loads(paths[1][0].read_text())
    torn = json.dumps(fields[0])[:-20]
    path.write_text("".join(json.dumps(each) + "\n" for each in fields) + torn)
    status, out, _ = replay(path)
    assert status == 1
    assert out.splitlines()[-1] == "replay: receipts=2 identical=1 different=1 not_replayable=0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields["request"].pop("token_ids"), "request lacks token_ids"),
        (lambda fields: fields["request"].update(priority="high"), "Failed to parse priority"),
        (lambda fields: fields["request"].update(nonsense=1), "no field named"),
        (lambda fields: fields["request"]["sampling"].update(temperature=10**39), "too large"),
        (lambda fields: fields["request"].update(sampling="\ud800"), "request: "),
        (lambda fields: fields["samples"].append(fields["samples"][0]), "it has 2 samples instead of 1"),
        (lambda fields: fields["samples"][0].update(start_position=3), "do not begin at position 6"),
        (lambda fields: fields["request"]["sampling"].update(max_tokens=10_000), "exceed the window"),
    ],
)
def test_a_receipt_of_no_possible_answer_is_refused(replay, answered, change, message):
    path, _ = answered(f"damaged {message[:20]}", change=change)
    status, out, _ = replay(path)
    assert status == 1
    assert message in out


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has no receipt"), (b"{}\n", "line 1: not a receipt"), (b"\xff\x00\n", "line 1: not a receipt")],
    ids=["empty", "object", "binary"],
)
def test_a_file_that_has_no_receipts_is_one_clear_line(replay, tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    status, out, err = replay(path)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert str(path) in err


def test_the_receipt_in_a_store_is_found(replay, answered, store_server, folder):
    from valkey import Valkey

    answered("stored")
    with Valkey(host="127.0.0.1", port=store_server.port) as server:
        server.set("outrider:{receipts}:of:stored", json.dumps(wait_for_receipt(folder, "stored")))
    assert replay("stored", f"--receipts={store_server.url}")[0] == 0
    status, _, err = replay("missing", f"--receipts=valkey://:s3cret@{store_server.url.removeprefix('valkey://')}")
    assert status == 1
    assert "s3cret" not in err


def test_a_file_that_the_replays_own_receipts_are_added_to_is_read_as_it_was(replay, answered, folder):
    answered("growing")
    (path,) = folder.iterdir()
    num_lines = len(path.read_bytes().splitlines())
    out = replay(path)[1]
    assert f"replay: receipts={num_lines} " in out

"""The history and the view of `outrider top`, as values without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.cli.top_history import CELL_SECONDS, RATE_CELLS, History, Trail
from outrider.cli.top_view import MAX_PROBLEMS, MAX_WORDS, ClusterView, escaped
from outrider.node import ClusterStatus, Model, NodeLoad, NodeRole, NodeState, NodeStatus

MODEL = Model(
    name="tiny",
    revision="",
    vocab_size=9,
    max_model_len=8,
    eos_token_ids=(),
    dtype="",
    proposer="",
    num_speculative_tokens=0,
    verification_method=None,
    fingerprint="",
    version="1.2.3",
)
PREFILL, DECODE, DRAFT = NodeRole.PREFILL, NodeRole.DECODE, NodeRole.DRAFT


def node(name="decode-0", role=DECODE, state=NodeState.SERVING, condition="", step=0, **load):
    load = NodeLoad(**{"kv_blocks_total": 100, "kv_blocks_free": 25} | load)
    return NodeStatus(name=name, role=role, state=state, target="h:1", step=step, load=load, condition=condition)


def status(*nodes, **figures):
    return ClusterStatus(nodes=nodes, **{"num_requests_running": 0, "num_requests_waiting": 0} | figures)


def history(*statuses, seconds=1.0):
    found = History()
    for number, each in enumerate(statuses):
        found.add(each, 100.0 + number * seconds)
    return found


def shown(found, *, width=120, model=MODEL, **source):
    """Returns the view's lines without colours."""
    console = Console(width=width, color_system=None, force_terminal=False, file=io.StringIO(), record=True)
    console.print(ClusterView(found, target="host:1", model=model, **source))
    return console.export_text().splitlines()


def row(lines, name):
    (found,) = [line for line in lines if line.startswith(name)]
    return found


# ---------------------------------------------------------------- history


def test_a_trail_has_the_latest_value_of_each_bucket():
    trail = Trail(bucket_seconds=5.0, num_buckets=3)
    assert (trail.by_bucket(), trail.rise, trail.rise_per_second) == ([None] * 3, 0.0, None)
    for at, value in [(1.0, 10.0), (4.0, 11.0), (6.0, 20.0)]:
        trail.add(at, value)
    assert trail.by_bucket() == [None, 11.0, 20.0]
    assert (trail.rise, trail.rise_per_second) == (9.0, 4.5)
    trail.add(16.0, 40.0)
    assert trail.by_bucket() == [20.0, None, 40.0]
    for number in range(1000):
        trail.add(17.0 + number * 0.01, number)
    assert len(trail._points) == 3


def test_a_rise_is_known_however_far_reports_are_apart():
    found = History()
    for number in range(4):
        found.add(status(node(step=600 * number, tokens_per_second=5.0), num_moves=number), 60.0 * number)
    assert (found.of("decode-0").steps.rise_per_second, found.moves_in_last_minute) == (10.0, 1)
    assert found.of("decode-0").tokens_per_second.by_bucket() == [None] * (RATE_CELLS - 1) + [5.0]


def test_a_counter_that_has_fallen_has_begun_anew():
    trail = Trail(bucket_seconds=1.0, num_buckets=10)
    for at, count in [(0.0, 90), (1.0, 100), (2.0, 3), (4.0, 9)]:
        trail.add_count(at, count)
    assert (trail.rise, trail.rise_per_second) == (6.0, 3.0)


def test_moves_of_the_last_minute_are_those_that_were_seen_of_one_router():
    found = History()
    for second in range(200):
        found.add(status(num_moves=second // 10), float(second))
    assert found.moves_in_last_minute == 6
    found.change_router()
    found.add(status(num_moves=500), 201.0)
    assert found.moves_in_last_minute == 0
    found.add(status(num_moves=502), 203.0)
    assert found.moves_in_last_minute == 2


def test_steps_a_second_survive_no_loss_of_the_node():
    """A lost node is listed with zero counts. When it returns, all of its steps must not count as a rise."""
    reports = [(NodeState.SERVING, 1000), (NodeState.LOST, 0), (NodeState.SERVING, 1000), (NodeState.SERVING, 1020)]
    found = History()
    rates = []
    for second, (state, step) in enumerate(reports):
        found.add(status(node(state=state, step=step)), float(second))
        rates.append(found.of("decode-0").steps.rise_per_second)
    assert rates == [None, None, None, 20.0]
    found.add(status(node("other")), 5.0)
    with pytest.raises(KeyError):  # a node that has left is forgotten
        found.of("decode-0")


# ---------------------------------------------------------------- view


def test_the_figures_of_a_cluster_are_in_their_places():
    reports = [
        status(
            node(
                "prefill-0", PREFILL, num_waiting=12, num_running=2, tokens_per_second=1234.0, kv_bytes_per_second=19e6
            ),
            node(
                "decode-0", step=20 * second, num_running=128, tokens_per_second=140.4, mean_acceptance_length=2.49,
                look_ahead_hit_rate=0.83, kv_bytes_per_second=5e5,
            ),
            node("draft-0", DRAFT, kv_blocks_total=0, kv_blocks_free=0, num_running=9, tokens_per_second=8.25),
            num_requests_running=130, num_requests_waiting=34, num_waiting_tokens=12345, oldest_wait_seconds=2.34,
            num_moves=3 + second,
        )
        for second in range(4)
    ]  # fmt: skip
    lines = shown(history(*reports))
    assert lines[:4] == [
        "outrider top  host:1  tiny  version 1.2.3",
        "130 running, 34 waiting (12,345 prompt tokens, the oldest for 2.3 s)",
        "tokens/s: 1.2k prompt, 140 generated, 8.2 proposed",
        "6 moves since the router's start, 3 in the last minute",
    ]
    titles = ["STATE", "RUN/WAIT", "KV", "TOK/S", "LAST", "MINUTE", "ACCEPT", "HITS", "KV", "MB/S", "STEPS/S"]
    heads = [line.split() for line in lines if "STATE" in line]
    assert heads == [[role, "(1)", *titles] for role in ("PREFILL", "DECODE", "DRAFT")]
    assert row(lines, "prefill-0").split() == [
        "prefill-0",
        "serving",
        "2/12",
        "75%",
        "██████··",
        "1.2k",
        "█",
        "19",
        "0",
    ]
    assert row(lines, "decode-0").split() == (
        ["decode-0", "serving", "128/0", "75%", "██████··", "140", "█", "2.49", "83%", "0.5", "20"]
    )
    assert row(lines, "draft-0").split() == ["draft-0", "serving", "9/0", "8.2", "█", "0"]


def test_the_sparkline_is_the_last_minute_measured_by_the_best_node_of_the_role():
    num_reports = 3 * RATE_CELLS
    reports = [
        status(
            node("fast", tokens_per_second=800.0 * second / (num_reports - 1)),
            node("slow", tokens_per_second=400.0 if second % 6 else 0.0),
        )
        for second in range(num_reports)
    ]
    lines = shown(history(*reports, seconds=CELL_SECONDS))
    assert row(lines, "fast").split()[6] == "▆▆▆▆▇▇▇▇▇███"
    assert row(lines, "slow").split()[6] == "▁▅▅▅▅▅▁▅▅▅▅▅"


@pytest.mark.parametrize(
    ("state", "condition", "word", "problem"),
    [
        (NodeState.SERVING, "late", "late", "! decode-1 is late"),
        (NodeState.LOST, "unreachable: gone", "lost", "! decode-1 is lost: unreachable: gone"),
        (NodeState.LOST, "refused: another model", "refused", "! decode-1 is refused: another model"),
        (NodeState.STARTING, "unreachable: no name", "unreachable", "! decode-1 is unreachable: no name"),
        (NodeState.LOST, "", "lost", "! decode-1 is lost"),
        (NodeState.DRAINING, "", "draining", None),
        (NodeState.STARTING, "", "starting", None),
        (None, "bewitched", "?", "! decode-1 is ?: bewitched"),
    ],
)
def test_a_node_that_is_not_well_is_named_above_the_table(state, condition, word, problem):
    lines = shown(history(status(node(), node("decode-1", state=state, condition=condition, num_running=7))))
    assert row(lines, "decode-1").split()[1] == word
    assert [line for line in lines if line.startswith("!")] == ([] if problem is None else [problem])
    has_figures = state in (NodeState.SERVING, NodeState.DRAINING)
    assert ("7/0" in row(lines, "decode-1")) is has_figures  # the zeros of a lost node are not shown


def test_problems_are_counted_where_they_are_many():
    lines = shown(history(status(*(node(f"d{number}", condition="late") for number in range(MAX_PROBLEMS + 4)))))
    problems = [line for line in lines if line.startswith("!")]
    assert (len(problems), problems[-1]) == (MAX_PROBLEMS + 1, "! and 4 more")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 81, 100, 120, 200])
@pytest.mark.parametrize("name", ["decode-0", "decode@127.0.0.1:50052", "節点" * 30], ids=["short", "long", "wide"])
def test_no_line_is_wider_than_the_terminal(width, name):
    reports = history(status(node(name, condition="unreachable: " + "word " * 30), node("prefill-0", PREFILL)))
    lines = shown(reports, width=width)
    console = Console(width=width)
    assert max(console.measure(line, options=console.options.update(width=10**6)).maximum for line in lines) <= width
    assert any(line.rstrip().endswith(("STEPS/S", "MB/S")) for line in lines) is (width >= 80)


def test_a_name_of_control_characters_is_cut_before_it_is_measured():
    name = "\U000e0001" * 300  # each becomes ten characters when escaped
    assert len(escaped(name)) == MAX_WORDS
    assert row(shown(history(status(node(name))), width=80), "…").startswith("…")


def test_names_differ_at_their_end():
    lines = shown(history(status(node("decode@10.0.0.17:50052"), node("decode@10.0.0.17:50053"))), width=80)
    assert [line.split()[0] for line in lines if line.startswith("…")] == ["…e@10.0.0.17:50052", "…e@10.0.0.17:50053"]


def test_what_others_say_is_neither_markup_nor_a_terminals_command():
    name = "[bold red]x[/]\x1b[2J\x1b]0;title\x07\u202e\r\n"
    lines = shown(history(status(node(name, condition=f"refused: {name}"))), error=name, width=160)
    text = "\n".join(lines)
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(text)
    assert "[bold red]x[/]\\x1b[2J\\x1b]0;title\\x07\\u202e\\r\\n" in text
    assert escaped("y" * 10**6) == "y" * (MAX_WORDS - 1) + "…"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), -5.0, 1e300, 10**25])
def test_figures_that_are_nonsense_are_shown_in_their_places(number):
    loads = dict.fromkeys(("tokens_per_second", "mean_acceptance_length", "look_ahead_hit_rate"), number)
    strange = node("strange", kv_bytes_per_second=number, kv_blocks_free=900, **loads)
    lines = shown(history(status(strange, oldest_wait_seconds=number, num_requests_waiting=1)), width=100)
    assert row(lines, "strange").startswith("strange      serving")
    assert max(map(len, lines)) <= 100


def test_figures_that_are_old_are_said_to_be():
    lines = shown(history(status(node())), error="host:1 cannot be reached", age_seconds=12.4)
    assert lines[1] == "no report for 12 s, the figures are old: host:1 cannot be reached; trying again"
    assert row(lines, "decode-0")


def test_before_the_first_report_it_says_what_it_waits_for():
    assert shown(History(), model=None) == ["outrider top  host:1", "connecting …"]
    lines = shown(History(), model=None, error="host:1 cannot be reached")
    assert lines == ["outrider top  host:1", "host:1 cannot be reached; trying again"]


def test_old_figures_are_dim_and_sick_nodes_red():
    def styled(**source):
        console = Console(width=100, force_terminal=True, color_system="standard", file=io.StringIO(), record=True)
        found = history(status(node(), node("decode-1", state=NodeState.LOST, condition="unreachable: gone")))
        console.print(ClusterView(found, target="host:1", **source))
        return console.export_text(styles=True).splitlines()

    lines = styled()
    (problem,) = [line for line in lines if "is lost" in line]
    assert problem.startswith("\x1b[1;31m")
    assert all("\x1b[2" not in line for line in lines)
    assert all("\x1b[2" in line or ";2" in line for line in styled(error="gone")[2:])

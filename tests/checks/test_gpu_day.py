"""The driver of a GPU day, and the computed minimum time of a step. `make gpu-dry` tests the stages themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from checks import gpu_day, gpu_floor
from checks.gpu_stages import env
from checks.gpu_stages.day import Day, write_line
from outrider.engine.cpu_kernels.compiler import path_flags
from outrider.engine.cpu_kernels.library_cache import CACHED_LIBRARY, library_folder
from tests.support.waiting import wait_for


def script(body):
    return [sys.executable, "-c", textwrap.dedent(body)]


def lines_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def output_of(stage, out):
    return (out / "output.txt").read_text().partition(f"==== {stage}\n")[2].partition("==== ")[0]


def run(commands, tmp_path, *, seconds=60.0, **options):
    """Runs stages, each with an equal part of the time."""
    return gpu_day.run_day(
        commands, dict.fromkeys(commands, 1), out=tmp_path, seconds=seconds, environ=os.environ, **options
    )


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_stage_that_fails_does_not_stop_the_others(tmp_path):
    ended = run({"first": script("raise SystemExit('lost')"), "second": script("print('here')")}, tmp_path)
    assert ended == {"first": "failed", "second": "passed"}
    failed, passed = lines_of(tmp_path)
    assert (failed["stage"], failed["status"], failed["exit_status"]) == ("first", "failed", 1)
    assert "lost" in failed["end"]
    assert (passed["stage"], passed["status"]) == ("second", "passed")
    assert output_of("second", tmp_path) == "here\n"


def test_a_stage_is_cut_off_with_all_that_it_started_and_says_so(tmp_path):
    body = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        time.sleep(600)
    """
    started = time.monotonic()
    ended = run({"endless": script(body), "next": script("pass")}, tmp_path, seconds=4.0)
    assert ended == {"endless": "cut off", "next": "passed"}
    assert time.monotonic() - started < 30
    (line, _) = lines_of(tmp_path)
    assert line["status"] == "cut off"
    assert line["limit"] == 2
    printed = output_of("endless", tmp_path)
    assert "cut off after 2 s" in printed
    wait_for(lambda: not is_alive(int(printed.split()[0])))


def test_what_a_stage_leaves_running_ends_with_it(tmp_path):
    body = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    """
    assert run({"careless": script(body)}, tmp_path) == {"careless": "passed"}
    pid = int(output_of("careless", tmp_path))
    wait_for(lambda: not is_alive(pid))


def test_results_are_there_before_their_stage_ends(tmp_path):
    body = """
        import pathlib, sys, time
        from checks.gpu_stages.day import Day
        out = pathlib.Path(sys.argv[1])
        Day(out=out, device="cpu", stage="early", scratch=out).tell("step", ms=1.5)
        time.sleep(600)
    """
    ended = run({"early": [*script(body), str(tmp_path)]}, tmp_path, seconds=4.0)
    assert ended == {"early": "cut off"}
    first, last = lines_of(tmp_path)
    assert {name: first[name] for name in ("stage", "kind", "ms")} == {"stage": "early", "kind": "step", "ms": 1.5}
    assert last["status"] == "cut off"


def test_what_a_stage_leaves_is_for_those_that_follow_and_a_slow_one_takes_nothing_from_them(tmp_path):
    commands = {
        "quick": script("pass"),
        "slow": script("import time; time.sleep(600)"),
        "patient": script("import time; time.sleep(600)"),
    }
    started = time.monotonic()
    ended = gpu_day.run_day(
        commands, {"quick": 20, "slow": 10, "patient": 10, "absent": 300}, out=tmp_path, seconds=4.0, environ=os.environ
    )
    assert ended == {"quick": "passed", "slow": "cut off", "patient": "cut off"}
    assert time.monotonic() - started < 30
    quick, slow, patient = lines_of(tmp_path)
    assert quick["seconds"] + slow["seconds"] == pytest.approx(3.0, abs=0.5)
    assert 0.5 < patient["seconds"] < 1.5


def test_the_ends_of_nodes_logs_are_kept_with_a_failed_stage(tmp_path):
    logs = tmp_path / "logs"
    (logs / "broken").mkdir(parents=True)
    (logs / "broken" / "decode-0.log").write_text("\n".join(f"line {number}" for number in range(100)))
    run({"broken": script("raise SystemExit(3)")}, tmp_path, node_logs=logs)
    printed = output_of("broken", tmp_path)
    assert "decode-0.log" in printed
    assert "line 99" in printed
    assert "line 5\n" not in printed


@pytest.fixture
def stage(monkeypatch):
    """stage(run) makes `run` the function of a made-up stage."""

    def set_stage(run):
        module = type(sys)("checks.gpu_stages.made_up")
        module.run = run
        monkeypatch.setitem(sys.modules, "checks.gpu_stages.made_up", module)

    return set_stage


def test_a_stage_fails_by_what_it_expects_and_by_errors(tmp_path, stage):
    def status_of(run):
        stage(run)
        return gpu_day.run_stage("made_up", Day(out=tmp_path, device="cpu", stage="made_up", scratch=tmp_path))

    assert status_of(lambda day: day.expect("one is one", True)) == 0
    assert status_of(lambda day: day.expect("one is two", False)) == 1
    assert status_of(lambda _day: {}["nothing"]) == 1
    assert [line["what"] for line in lines_of(tmp_path)] == ["one is two", "made_up: KeyError: 'nothing'"]


def test_a_stage_goes_on_after_a_part_that_fails_and_long_reasons_are_cut(tmp_path):
    day = Day(out=tmp_path, device="cpu", stage="parts", scratch=tmp_path)
    with day.part("first"):
        raise RuntimeError("x" * 10_000)
    with day.part("second"):
        day.tell("step", ms=1.0)
    assert len(day.failures) == 1
    failure, step = lines_of(tmp_path)
    assert failure["what"].startswith("first: RuntimeError: xxx")
    assert len(failure["what"]) < 500
    assert step["ms"] == 1.0


def test_weights_are_found_again_where_an_earlier_call_has_left_no_room(tmp_path, monkeypatch):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    free = {memory: gpu_day.WEIGHTS_BYTES - 1, disk: gpu_day.WEIGHTS_BYTES + 1}
    for folder in free:
        folder.mkdir()
    monkeypatch.setattr(gpu_day, "SCRATCH_PARENTS", (tmp_path / "absent", memory, disk))
    monkeypatch.setattr(gpu_day.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert gpu_day.choose_scratch().parent == disk
    free[memory] *= 2
    found = gpu_day.choose_scratch()
    assert found.parent == memory
    found.mkdir()
    free[memory] = 0
    assert gpu_day.choose_scratch() == found
    found.rmdir()
    free[disk] = 0
    assert gpu_day.choose_scratch() == found


def test_stages_have_modules_and_fit_into_the_day():
    assert sum(gpu_day.STAGES.values()) == gpu_day.SECONDS
    for name in gpu_day.STAGES:
        assert (gpu_day.ROOT / "checks" / "gpu_stages" / f"{name}.py").is_file()


def test_all_stages_together_leave_at_most_eight_files_since_no_more_come_back_from_a_gpu_machine(tmp_path):
    run({f"stage{number}": script("print('here')") for number in range(len(gpu_day.STAGES))}, tmp_path)
    assert len(list(tmp_path.iterdir())) <= 8


def test_kernels_that_were_built_with_another_c_library_are_adopted(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_KERNEL_LIBRARIES", str(tmp_path))
    assert set(env.adopt_kernels().values()) == {"absent"}
    carried = tmp_path / "portable-0123456789abcdef"
    carried.mkdir()
    shutil.copy(xxhash._xxhash.__file__, carried / CACHED_LIBRARY)  # any library that can be loaded
    states = env.adopt_kernels()
    assert states.pop("portable") == "carried"
    assert set(states.values()) == {"absent"}
    assert env.adopt_kernels()["portable"] == "here"
    assert library_folder("portable", path_flags()["portable"]).is_dir()


def test_an_unknown_stage_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        gpu_day.main(["--out", str(tmp_path), "--scratch", str(tmp_path), "--stages", "env,nonsense"])
    assert refused.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_lines_are_appended(tmp_path):
    for number in range(3):
        write_line(tmp_path / "results.jsonl", stage="x", number=number)
    assert [line["number"] for line in lines_of(tmp_path)] == [0, 1, 2]


def test_failed_tests_are_found_in_what_pytest_prints():
    from checks.gpu_stages.kernels import failed_test

    assert failed_test("tests/gpu/test_x.py::test_a[1-2] FAILED          [ 5%]") == "tests/gpu/test_x.py::test_a[1-2]"
    assert failed_test("[gw3] [ 12%] FAILED tests/gpu/test_x.py::test_a") == "tests/gpu/test_x.py::test_a"
    assert failed_test("ERROR tests/gpu/test_x.py - ImportError: no torch") == "tests/gpu/test_x.py"
    assert not failed_test("tests/gpu/test_x.py::test_a PASSED          [ 5%]")
    assert not failed_test("E   AssertionError: FAILED to say so in words")


def test_steps_and_texts_are_found_in_what_train_head_says():
    from checks.gpu_stages.train import steps_of, texts_of

    said = "training 17 s, step 240: loss 7.312, held out 7.401, acceptance 0.012 0.003"
    assert steps_of(said) == (17, 240)
    assert texts_of("features of 312 texts, 40123 tokens") == (312, 40123)
    assert steps_of("training: target tiny, form eagle3") is texts_of(said) is None


def test_kernels_that_run_at_the_same_time_count_once():
    from checks.gpu_stages.kernel_spans import busy_and_pauses

    assert busy_and_pauses([(5.0, 7.0), (0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (7.0, 8.0)]) == (7.0, [1.0])
    assert busy_and_pauses([]) == (0.0, [])


# ---- the minimum time of a step


def test_the_weights_of_llama_8b():
    """A step reads all of the 8.03 B parameters except the embedding's 0.53 B and the norms."""
    assert gpu_floor.LLAMA_8B.weight_bytes == 2 * 7_504_658_432
    assert gpu_floor.LLAMA_8B.kv_bytes_per_token == 131_072


def test_the_floor_is_bytes_over_bandwidth():
    assert gpu_floor.floor_ms(gpu_floor.LLAMA_8B, 1, 512, 3.0e12) == pytest.approx(5.03, abs=0.01)
    assert gpu_floor.floor_ms(gpu_floor.LLAMA_8B, 128, 512, 3.0e12) == pytest.approx(7.87, abs=0.01)
    assert gpu_floor.floor_ms(gpu_floor.LLAMA_8B, 128, 512, 1.5e12) == pytest.approx(2 * 7.87, abs=0.01)


def test_sizes_with_heads_of_their_own_size():
    """Gemma 3 1B has 4 heads of 256 over a hidden size of 1152."""
    sizes = gpu_floor.Sizes(
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=262_144,
        head_dim=256,
    )
    assert sizes.layer_weights == (1152 * 1536, 1024 * 1152, 2 * 1152 * 6912, 6912 * 1152)
    assert sizes.kv_bytes_per_token == 2 * 26 * 256 * 2


def test_a_prediction_is_above_the_floor_and_grows_with_kernels():
    machine = gpu_floor.Machine()
    for num_seqs in gpu_floor.BATCHES:
        few, many = (
            gpu_floor.predict(
                gpu_floor.LLAMA_8B, num_seqs, 512, machine=machine, code=gpu_floor.Code(kernels_per_layer=kernels)
            )
            for kernels in (9, 42)
        )
        assert 1 < few.times_floor < many.times_floor < 2
        assert few.total == pytest.approx(few.products + few.small_kernels + few.attention + few.sampler + few.host)


def test_the_table_has_a_line_for_each_batch(capsys):
    assert gpu_floor.main(["--kernels", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["1", "8", "32", "128"]


@pytest.mark.full  # test_gpu_handoff.py pushes by the same connectors, fewer times
def test_the_stage_handoff_pushes_kv_between_two_processes_by_each_connector(tmp_path):
    """The stage calls parts of nodes. If a call no longer fitted them, a GPU day would lose these figures."""
    command = [sys.executable, "-m", "checks.gpu_day", "--stage", "handoff", "--device", "cpu"]
    subprocess.run([*command, "--out", tmp_path, "--scratch", tmp_path / "scratch"], cwd=gpu_day.ROOT, check=True)
    pushed = {(line["connector"], line["at_once"]) for line in lines_of(tmp_path) if "gb_s" in line}
    assert pushed == {(name, number) for name in ("shared_memory", "grpc") for number in (1, 4)}

import sys

from lab.harness.engines import Workplace, launch_engine


def test_an_engine_knows_of_the_sidecar_what_it_is_told_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/somebody/else.sock")
    monkeypatch.setenv("SPECULATION_SAFE_GAMMA", "1")
    code = "import os; print(sorted(k + v for k, v in os.environ.items() if 'SPECULATION' in k))"
    place = Workplace(tmp_path / "output", tmp_path / "scratch")
    environment = {"SPECULATION_SIDECAR": place.address}
    engine = launch_engine("x", lambda _: [sys.executable, "-c", code], environment, place)
    with engine.child:
        engine.child.wait(120)
        assert engine.child.last_line() == f"['SPECULATION_SIDECAR{place.address}']"


def test_a_crash_is_not_dumped_unless_a_variable_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "1")
    code = "import os; print(sorted(k + v for k, v in os.environ.items() if 'BEFORE_CRASH' in k))"
    place = Workplace(tmp_path / "output", tmp_path / "scratch")
    engine = launch_engine("x", lambda _: [sys.executable, "-c", code], {}, place)
    with engine.child:
        engine.child.wait(120)
        expected = "['SGLANG_CUDA_COREDUMP_BEFORE_CRASH0', 'SGLANG_PYSPY_DUMP_BEFORE_CRASH1']"
        assert engine.child.last_line() == expected

import sys

from lab.harness import measured


def test_machine_and_versions_are_told():
    assert measured.machine()["cores"] >= 1
    assert measured.machine()["processor"]
    assert measured.versions()["grpcio"][0].isdigit()


def test_graphics_cards_are_told_where_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measured.machine()["gpus"] == []
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!{sys.executable}\nprint('A Card, 10 MiB, 5.1')\n")
    command.chmod(0o755)
    assert measured.machine()["gpus"] == ["A Card, 10 MiB, 5.1"]

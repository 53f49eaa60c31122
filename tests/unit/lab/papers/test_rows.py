"""The bars of mixtures are measured from files, one row for each trace and batch size."""

import json

import numpy as np
from typer.testing import CliRunner

from lab.papers.__main__ import app
from lab.papers.rows import in_pieces
from simulator.acceptance_trace import AcceptanceTrace
from simulator.copying import Copying


def write(path, requests=24, output=120):
    lengths = np.full(requests, output, dtype=np.int64)
    pool = Copying("", copied=0.6).pool(np.random.default_rng(0), requests, lengths, lengths)
    lines = [
        {
            "prompt_token_ids": list(range(9)),
            **{
                f"acc_{name}": {"acc_len": (values[at : at + output].astype(int) + 1).tolist()}
                for name, values in pool.accepted.items()
            },
        }
        for at in pool.offsets.tolist()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_long_requests_are_served_in_pieces_that_know_their_context(tmp_path):
    trace = AcceptanceTrace.load([write(tmp_path / "a.jsonl")])
    cut = in_pieces(trace, 50)
    assert [(r.positions, r.context_tokens) for r in cut.recorded[:3]] == [
        (50, 9),
        (50, 59),
        (20, 109),
    ]
    whole = np.concatenate([r.accepted["eagle"] for r in trace.recorded])
    assert (np.concatenate([r.accepted["eagle"] for r in cut.recorded]) == whole).all()


def test_every_file_and_all_of_them_have_a_row(tmp_path):
    files = [str(write(tmp_path / f"{name}.jsonl")) for name in ("one", "two")]
    arguments = ["rows", *files, "--batch-sizes", "4", "--steps", "60", "--processes", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    for name in ("one", "two", "all"):
        assert f"│ {name} " in done.output


def test_the_longest_requests_can_be_left_out(tmp_path):
    files = [write(tmp_path / "short.jsonl", output=60), write(tmp_path / "long.jsonl", output=120)]
    both = tmp_path / "both.jsonl"
    both.write_text("".join(file.read_text() for file in files))
    arguments = ["--batch-sizes", "4", "--steps", "60", "--processes", "1"]
    cut = CliRunner().invoke(app, ["rows", str(both), *arguments, "--longest", "60"])
    (tmp_path / "same").mkdir()
    same = files[0].rename(tmp_path / "same" / "both.jsonl")
    alone = CliRunner().invoke(app, ["rows", str(same), *arguments])
    assert cut.exit_code == 0, cut.output
    assert cut.output == alone.output
    # Nothing is left.
    none = CliRunner().invoke(app, ["rows", str(both), *arguments, "--longest", "5"])
    assert none.exit_code == 2


def test_a_batch_size_that_is_no_number_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["rows", str(write(tmp_path / "a.jsonl")), "--batch-sizes", "x"])
    assert done.exit_code == 2

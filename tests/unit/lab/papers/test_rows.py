"""The bars of mixtures are measured from files, one row for each trace and batch size."""

import json

import numpy as np
from typer.testing import CliRunner

from lab.papers.__main__ import app
from lab.papers.rows import in_pieces
from simulator.acceptance_trace import AcceptanceTrace
from simulator.copying import CopyingSource


def write(path, requests=24, output=120):
    lengths = np.full(requests, output, dtype=np.int64)
    pool = CopyingSource("", copied=0.6).pool(np.random.default_rng(0), requests, lengths, lengths)
    lines = [
        {
            "prompt_token_ids": list(range(9)),
            **{
                f"acc_{name}": {
                    "acc_len": (values[offset : offset + output].astype(int) + 1).tolist()
                }
                for name, values in pool.accepted.items()
            },
        }
        for offset in pool.offsets.tolist()
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

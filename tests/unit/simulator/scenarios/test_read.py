"""A scenario file is read strictly, and every error names file, line and field."""

from pathlib import Path

import pytest
import yaml

from simulator.errors import InvalidInputError
from simulator.scenarios.scenario_file import load_scenario, read_scenario_file
from simulator.workload import OpenLoop
from tests.unit.simulator.scenarios.minimal import values

HEAD = """\
name: small
cost: {published: h100-llama3.1-8b, drafters: [eagle]}
traffic:
  code: {geometric: {eagle: 0.7}}
  old: {positions: {eagle: [0.5]}, output_tokens_mean: 100}
phases:
  - {kind: code, batch: 4, tokens: 100}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "mine.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_the_scenario_that_it_describes(tmp_path: Path):
    scenario = load_scenario(written(tmp_path, HEAD + "seeds: 5\nmoving: true\n"))
    assert (scenario.name, scenario.group, scenario.seeds) == ("small", "given", 5)
    assert scenario.shifting
    assert [d.name for d in scenario.surface.drafters] == ["eagle"]
    assert scenario.max_batch_size == 64
    assert scenario.options.switch_seconds == 2e-4
    assert scenario.sustained_tpot_p99_seconds is None


@pytest.mark.parametrize("number", ["2e-4", "0.0002", "2.0E-04", "20e-5", "+2e-4"])
def test_numbers_may_have_an_exponent_without_a_point(tmp_path: Path, number: str):
    text = HEAD.replace("[eagle]}", f"[eagle], switch_seconds: {number}}}")
    file, _ = read_scenario_file(written(tmp_path, text))
    assert file.cost.switch_seconds == pytest.approx(2e-4)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "mine.yaml: name: is missing"),
        ("- a\n", "mine.yaml:1: the file is not a mapping"),
        ("name: a\nname: b\n", "mine.yaml:2: name is set twice, first in line 1"),
        ("a: &x 1\nb: *x\n", "mine.yaml:1: anchors and aliases are not supported"),
        ("a: !!python/object:os.system 1\n", "mine.yaml:1: tags are not supported"),
        ("a: [1\n", "mine.yaml:2: "),
        ("a: " + "[" * 20_000, "mine.yaml:1: nested too deeply"),
        (HEAD + "colour: red\n", "mine.yaml:8: colour: is not a field here"),
        (HEAD + "seeds: 0\n", "mine.yaml:8: seeds: should be greater than or equal to 1, not 0"),
        (HEAD + "seeds: 1.5\n", "mine.yaml:8: seeds: "),
        (HEAD + "seeds: true\n", "mine.yaml:8: seeds: a number is needed, not True"),
        (HEAD + "seeds: many\n", "mine.yaml:8: seeds: a number is needed, not 'many'"),
        (HEAD + "repeat: 100000\n", "mine.yaml:8: repeat: "),
        (HEAD + "engine: {step_noise: .nan}\n", "mine.yaml:8: engine.step_noise: "),
        (HEAD + "engine: {lag_steps: -1}\n", "mine.yaml:8: engine.lag_steps: "),
        (HEAD + "engine: {prefill: sometimes}\n", "mine.yaml:8: engine.prefill: "),
        (HEAD + "profile: {factor: 0}\n", "mine.yaml:8: profile.factor: "),
        (HEAD + "profile: {noise: 1.5, noise_shape: uniform}\n", "mine.yaml:8: profile: a uniform"),
        (HEAD + "profile: {by_arm: {eagle: {11: 2.0}}}\n",
         "mine.yaml:8: profile.by_arm.eagle: there is no arm of 'eagle' with draft length 11"),
        (HEAD + "arrivals: {kind: code, rates: []}\n", "mine.yaml:8: arrivals.rates: "),
        (HEAD + "arrivals: {kind: code, file: a.csv}\n", "either phases or arrivals is needed"),
        (HEAD.replace("kind: code", "kind: news"),
         "mine.yaml:7: phases[0].kind: traffic has no kind 'news'; there are code, old"),
        (HEAD.replace("batch: 4", "batch: 65"), "mine.yaml:7: phases[0].batch: 65 sequences"),
        (HEAD.replace("tokens: 100}\n", "}\n"),
         "mine.yaml:7: phases[0]: either tokens or steps is needed"),
        (HEAD + "  - {kind: old, batch: 4, tokens: 100, begins: changed}\n",
         "mine.yaml:8: phases[1].begins: running requests can change over only to a kind"),
        (HEAD.replace("geometric: {eagle: 0.7}", "geometric: {ngram: 0.7}"),
         "mine.yaml:4: traffic.code: has no acceptance for drafter 'eagle', only for ['ngram']"),
        (HEAD.replace("geometric: {eagle: 0.7}", "survival: {eagle: [0.5, 0.6]}"),
         "mine.yaml:4: traffic.code.survival.eagle: survival: position 2: 0.6 is more than 0.5"),
        (HEAD.replace("geometric: {eagle: 0.7}", "mix: {news: 1}"),
         "mine.yaml:4: traffic.code.mix.news: there is no kind 'news'"),
        (HEAD.replace("geometric: {eagle: 0.7}", "trace: {requests: [no.jsonl]}"),
         "no.jsonl: cannot be read"),
        (HEAD.replace("geometric: {eagle: 0.7}",
                      "geometric: {eagle: 0.7}, memory: {correlation: 2}"),
         "mine.yaml:4: traffic.code.memory: correlation: 2.0 must be in [0, 1]"),
        (HEAD.replace("h100-llama3.1-8b", "h100"), "mine.yaml:2: cost.published: "),
        (HEAD.replace("[eagle]", "[hawk]"), "mine.yaml:2: cost.drafters[0]: 'hawk' is not one of"),
        (HEAD.replace("published: h100-llama3.1-8b, drafters: [eagle]", "table: {eagle: no.csv}"),
         "no.csv: cannot be read"),
        (HEAD.replace("published: h100-llama3.1-8b, drafters: [eagle]", "scale: 2"),
         "mine.yaml:2: cost: one of published, table, profile, formula is needed"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_its_place(tmp_path: Path, text: str, fault: str):
    with pytest.raises(InvalidInputError) as error:
        load_scenario(written(tmp_path, text))
    message = str(error.value)
    assert fault in message
    assert str(tmp_path / "mine.yaml") in message
    assert "\n" not in message
    assert len(message) < 700


def test_files_that_cannot_be_read_are_faults(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="No such file"):
        load_scenario(tmp_path / "none.yaml")
    with pytest.raises(InvalidInputError, match="not a regular file"):
        load_scenario(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        load_scenario(tmp_path / "bytes.yaml")
    (tmp_path / "large.yaml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(InvalidInputError, match="larger than 1024 KiB"):
        load_scenario(tmp_path / "large.yaml")


def test_files_are_relative_to_the_scenario(tmp_path: Path):
    rows = [f"{b},{w},{0.005 + 1e-4 * b * w}" for b in (1, 8) for w in (1, 2, 4)]
    (tmp_path / "costs.csv").write_text(
        "\n".join(["batch_size,num_draft_tokens,step_seconds", *rows])
    )
    (tmp_path / "times.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,20\n1,9,8\n")
    text = yaml.safe_dump(
        values(
            engine=...,
            cost={"table": {"eagle": "costs.csv"}},
            phases=...,
            arrivals={"kind": "code", "file": "times.csv"},
        )
    )
    scenario = load_scenario(written(tmp_path, text))
    assert scenario.max_batch_size == 8
    workload = scenario.workload(0)
    assert isinstance(workload, OpenLoop)
    assert workload.arrival_seconds.tolist() == [0.0, 1.0]

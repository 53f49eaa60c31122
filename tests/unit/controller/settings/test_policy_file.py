"""The policy file as people write it, right and wrong."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from controller.cli import app
from controller.core.engine_spec import MAX_BATCH_SIZE
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.settings.policy_file import PolicyFileError, read_policy
from controller.util.exit_codes import Exit

FILE = """\
policies:
  - name: chat
    model: org/model
    reason: measured in May
    schedule:
      - {batch: 1-8, gamma: 5}
      - {batch: 9-32, gamma: 3, drafter: eagle3}
      - {batch: 33-, gamma: 0}
  - name: bounds
    fleet: true
    reason: longer drafts run out of memory
    at_least: 1
    at_most: 5
    batch: -16
  - name: pod
    engine: pod-7:30000
    reason: a test
    gamma: 2
    batch: 8
"""


def read(folder: Path, text: str) -> tuple[Override, ...]:
    path = folder / "policy.yaml"
    path.write_text(text)
    return read_policy(path)[0]


def test_every_entry_becomes_overrides_that_are_from_a_file_in_its_order(tmp_path: Path):
    model = Scope(ScopeKind.MODEL, "org/model")
    author_and_reason = "policy file", "measured in May"
    first, second, third, bounds, pod = read(tmp_path, FILE)
    assert first == Override(
        "policy:chat:1", model, Rule(gamma=5), *author_and_reason, 1, 8, revision=1, from_file=True
    )
    assert second.rule == Rule(gamma=3, drafter="eagle3")
    assert (third.override_id, third.min_batch_size, third.max_batch_size) == (
        "policy:chat:33", 33, 0
    )  # fmt: skip
    assert (bounds.scope, bounds.rule) == (Scope(ScopeKind.FLEET), Rule(gamma_min=1, gamma_max=5))
    assert (bounds.min_batch_size, bounds.max_batch_size) == (1, 16)
    assert pod.scope == Scope(ScopeKind.ENGINE, "pod-7:30000")
    assert (pod.min_batch_size, pod.max_batch_size) == (8, 8)
    overrides = (first, second, third, bounds, pod)
    assert [override.revision for override in overrides] == [1, 2, 3, 4, 5]
    assert all(override.from_file for override in overrides)


def test_the_file_of_the_page_is_one(tmp_path: Path):
    page = Path(__file__).resolve().parents[4] / "docs" / "overrides.md"
    text = page.read_text().partition("<!-- policy -->\n```yaml\n")[2].partition("```")[0]
    names = [override.override_id for override in read(tmp_path, text)]
    assert names == ["policy:chat:1", "policy:chat:9", "policy:chat:33", "policy:memory"]


def test_the_command_prints_what_a_file_stands_for_or_what_is_wrong_with_it(tmp_path: Path):
    path = tmp_path / "policy.yaml"
    path.write_text(FILE)
    done = CliRunner().invoke(app, ["policy", "check", str(path)])
    assert done.exit_code == Exit.DONE
    cells = re.split("  +", done.stdout.splitlines()[2])
    assert cells == [
        "policy:chat:9", "model org/model at B 9-32", "gamma = 3, drafter eagle3", "measured in May"
    ]  # fmt: skip
    path.write_text("policies: 1\n")
    done = CliRunner().invoke(app, ["policy", "check", str(path)])
    assert done.exit_code == Exit.USAGE
    assert f"{path}, line 1: policies: must be a list" in done.stderr
    path.write_text("policies: []\n")
    assert "empty policy" in CliRunner().invoke(app, ["policy", "check", str(path)]).stdout


@pytest.mark.parametrize("text", ["policies: []\n", "policies: []", "# none\n---\npolicies: []\n"])
def test_an_empty_list_is_an_empty_policy(tmp_path: Path, text: str):
    assert read(tmp_path, text) == ()


@pytest.mark.parametrize("text", ["", "\n", "# policy of the day\n", "---\n", "{}\n"])
def test_what_may_be_the_beginning_of_a_file_is_no_policy(tmp_path: Path, text: str):
    with pytest.raises(PolicyFileError, match=r"write `policies: \[\]`|policies: Field required"):
        read(tmp_path, text)


def entry(text: str) -> str:
    return f"policies:\n  - name: a\n    fleet: true\n    reason: r\n    {text}\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (entry("at_mos: 3"), 5, "at_mos is not a key of the policy file: did you mean at_most?"),
        (entry("at-most: 3"), 5, "at-most is not a key of the policy file: did you mean at_most?"),
        (entry("x: 3"), 5, "x is not a key of the policy file: known keys: name, reason, engine"),
        (entry("schedule: [{batch: 1, gama: 1}]"), 5, "did you mean gamma?"),
        (entry("off: true"), 5, "off is not a key of the policy file"),
        (entry("<<: {gamma: 1}"), 5, "<< is not a key of the policy file"),
        (entry("gamma: 65"), 5, "gamma: Input should be less than or equal to 64"),
        (entry("gamma: five"), 5, "gamma: Input should be a valid integer"),
        (entry("gamma: true"), 5, "gamma: Input should be a valid integer"),
        (entry("gamma: 1\n    gamma: 2"), 6, "gamma is set twice"),
        (entry("gamma: 1\n    batch: 9-3"), 6, "batch 9-3: must be ascending sizes"),
        (entry("gamma: 1\n    batch: 0"), 6, "batch 0: must be ascending sizes"),
        (entry(f"gamma: 1\n    batch: {MAX_BATCH_SIZE + 1}"), 6, "must be ascending sizes"),
        (entry("gamma: 1\n    batch: many"), 6, "a batch size or a range is needed"),
        (entry("gamma: 1\n    model: m"), 2, "exactly one of engine, model and fleet: true"),
        (entry("gamma: 1\n    at_most: 3"), 2, "a: gamma is pinned"),
        (entry("at_least: 4\n    at_most: 3"), 2, "a: gamma_min 4 is above gamma_max 3"),
        (entry("drafter: ''"), 2, "a: drafter"),
        (entry("batch: 3"), 2, "a: an override must demand something"),
        (
            entry("schedule: [{batch: 1-8, gamma: 1}, {batch: 8, gamma: 2}]"),
            2,
            "and not overlap",
        ),
        (
            entry("schedule: [{batch: 5-, gamma: 1}, {batch: 9, gamma: 2}]"),
            2,
            "and not overlap",
        ),
        (entry("schedule: [{batch: 5-}]"), 5, "gamma: Field required"),
        (
            entry("at_most: 3\n    schedule: [{batch: 1, gamma: 1}]"),
            2,
            "an entry with a schedule cannot have",
        ),
        (entry("gamma: 1") + "  - {name: a, fleet: true, reason: r, gamma: 2}\n", 1, "used twice"),
        ("policies:\n  - {fleet: true, reason: r, gamma: 1}\n", 2, "name: Field required"),
        ("policies:\n  - {name: a b, fleet: true, reason: r, gamma: 1}\n", 2, "name: "),
        ("policies:\n  - {name: a, fleet: true, gamma: 1}\n", 2, "reason: Field required"),
        (
            "policies:\n  - {name: a, reason: r, gamma: 1}\n",
            2,
            "exactly one of engine, model and fleet",
        ),
        ("policies:\n", 1, "policies: must be a list"),
        ("policies: {a: 1}\n", 1, "policies: must be a list"),
        ("policy: []\n", 1, "policy is not a key of the policy file: did you mean policies?"),
        ("- a\n", 1, "not a mapping"),
        ("policies: &a []\n", 1, "anchors"),
        ("policies: !!python/object:os.system []\n", 1, "tags"),
        ("policies:\n  - {name: a, x: [[[[1]]]]}\n", 2, "nested too deeply"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
):
    with pytest.raises(PolicyFileError) as caught:
        read(tmp_path, text)
    assert f"policy.yaml, line {line}: " in str(caught.value)
    assert message in str(caught.value)


def test_every_fault_of_a_file_is_named_at_once(tmp_path: Path):
    text = "policies:\n  - {name: a, fleet: true, reason: r, gamma: -1}\n  - {name: b, x: 1}\n"
    with pytest.raises(PolicyFileError) as caught:
        read(tmp_path, text)
    assert "line 2: gamma" in str(caught.value)
    assert "line 3: x is not a key" in str(caught.value)


def test_a_file_has_a_size_and_a_number_of_entries(tmp_path: Path):
    steps = ", ".join(f"{{batch: {size}, gamma: 1}}" for size in range(1, 66))
    with pytest.raises(PolicyFileError, match="65 entries, at most 64"):
        read(tmp_path, entry(f"schedule: [{steps}]"))
    with pytest.raises(PolicyFileError, match="larger than 64 KiB"):
        read(tmp_path, "#" * 65_537)


def test_what_is_no_file_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "away", Path("/dev/zero")):
        with pytest.raises(PolicyFileError, match=str(path)):
            read_policy(path)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["policies", "name", "fleet", "gamma", "batch", "schedule", "reason"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(_VALUES)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path: Path, value: object):
    with suppress(PolicyFileError):
        overrides = read(tmp_path, yaml.safe_dump({"policies": value}))
        assert len(overrides) == len({override.override_id for override in overrides})

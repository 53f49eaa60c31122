"""Profiles: they survive the file, and nothing but a profile comes out of one."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.profile import Profile, ProfileCell
from controller.core.engine_spec import DrafterSpec, Fingerprint
from controller.core.errors import InvalidProfileError, ProfileMismatchError
from controller.core.model_shapes import DrafterKind
from tests.unit.controller.core.cost.small_profile import FINGERPRINT, PROFILE

DRAFTER = DrafterSpec("mtp", DrafterKind.MTP, (0, 2), "models/draft", "r1")


@given(
    st.text(max_size=20),
    st.lists(
        st.tuples(st.integers(0, 16), st.integers(1, 512), st.floats(1e-6, 100)),
        min_size=1, max_size=20, unique_by=lambda c: c[:2],
    ),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_profile_survives_its_file(model, cells):
    profile = dataclasses.replace(
        PROFILE,
        fingerprint=Fingerprint(model),
        cells=tuple(ProfileCell("mtp", g, b, s, 0.0, 1) for g, b, s in cells),
    )
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.profile_id == profile.profile_id


def broken(**changes):
    return json.dumps(json.loads(PROFILE.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format is 'list'"),
        ('{"format": "other/2"}', "format is 'other/2'"),
        (broken(cells=[]), "no measurement"),
        (broken(cells=[{"drafter": "mtp"}]), "'gamma' is missing"),
        (broken(cells="no"), "a list is needed"),
        (broken(surprise=1), "unknown field 'surprise'"),
        (broken(seconds_per_kv_token=-1), "seconds_per_kv_token"),
        (broken(kv_tokens_per_sequence=1e300), "kv_tokens_per_sequence 1e.300 must be between"),
        (broken(kv_tokens_per_sequence=True), "kv_tokens_per_sequence"),
        (broken(fingerprint={"target_model": 3}), "fingerprint.target_model"),
        (broken(drafters=[]), "no such drafter"),
        (PROFILE.to_json().replace("0.01", "NaN"), "step_seconds .* must be above 0"),
        (PROFILE.to_json().replace("0.01", "-0.01"), "step_seconds .* must be above 0"),
        (PROFILE.to_json().replace('"gamma": 2', '"gamma": 0'), "appears twice"),
    ],
)
def test_anything_but_a_profile_is_refused_and_says_where(text, message):
    with pytest.raises(InvalidProfileError, match=message):
        Profile.from_json(text)


def test_its_own_engine_matches_whatever_the_shim_version():
    PROFILE.require_match(dataclasses.replace(FINGERPRINT, shim_version="9"), (DRAFTER,))


@pytest.mark.parametrize(
    "change",
    [
        {"target_model": "x"},
        {"device": "H200"},
        {"graph_batch_sizes": (1,)},
        {"tensor_parallel_size": 2},
    ],
)
def test_another_fingerprint_is_refused_and_the_field_is_named(change):
    with pytest.raises(ProfileMismatchError, match=next(iter(change))):
        PROFILE.require_match(dataclasses.replace(FINGERPRINT, **change), (DRAFTER,))


def test_another_draft_revision_is_refused():
    with pytest.raises(ProfileMismatchError, match="drafter mtp"):
        PROFILE.require_match(FINGERPRINT, (dataclasses.replace(DRAFTER, revision="r2"),))
    with pytest.raises(ProfileMismatchError, match="drafters"):
        PROFILE.require_match(FINGERPRINT, (dataclasses.replace(DRAFTER, name="dflash"),))

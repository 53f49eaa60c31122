"""What is predicted of attention backends, against SGLang's own code, which allocates it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_shim.sglang.memory import Attention, Place, Size, Use, backend, draft_passes
from tests.support.engine import forked
from tests.support.model_configurations import latent_model, plain_model

pytestmark = [pytest.mark.slow]

PROBE = "tests.unit.engine_shim.sglang.backend_probe"
PATIENCE_SECONDS = 240.0
MIB = 2**20
REQUESTS = 48

# The shapes of the two models in `tests.support.model_configurations`.
PLAIN = Attention(
    latent=False, context=32768, page=1, heads=4, all_heads=4, value_size=32, kv_splits=8,
    cache_numbers=0, cache_bytes=2, requests=REQUESTS, workspace=512 * MIB, windowed=False,
)  # fmt: skip
LATENT = Attention(
    latent=True, context=32768, page=1, heads=16, all_heads=16, value_size=512, kv_splits=256,
    cache_numbers=576, cache_bytes=2, requests=REQUESTS, workspace=512 * MIB, windowed=False,
)  # fmt: skip
BACKENDS = [
    ("flashinfer", PLAIN, 1),
    ("triton", PLAIN, 1),
    ("fa3", PLAIN, 1),
    ("fa4", PLAIN, 128),
    ("trtllm_mha", PLAIN, 64),
    ("trtllm_mha", replace(PLAIN, requests=4096), 64),
    ("flashinfer", LATENT, 1),
    ("triton", LATENT, 1),
    ("fa3", LATENT, 1),
    ("trtllm_mla", LATENT, 64),
    ("trtllm_mla", replace(LATENT, requests=16384), 64),
    ("cutedsl_mla", LATENT, 32),
    ("flashmla", LATENT, 64),
]
LENGTHS = [(0, [1, 2, 40]), (2, [1, 4, 48]), (7, [16])]
CASES = [
    (name, model, page, place, gamma, batches)
    for name, model, page in BACKENDS
    for gamma, batches in LENGTHS
    for place in Place
    if gamma > 1 or place is not Place.STEP
]
# FlashInfer's wrappers for latent attention, of 8 MiB, that SGLang plans with: read off its code,
# since nothing plans here.  By backend and place: with the backend, and for each graph.
PLANNED = {
    ("flashinfer", Place.VERIFY): (3, 1),
    ("flashinfer", Place.EXTEND): (3, 0),
    ("flashinfer", Place.STEP): (1, 1),
    **{
        (name, place): (0 if place is Place.STEP else 1, 0)
        for name in ("trtllm_mla", "cutedsl_mla", "flashmla")
        for place in Place
    },
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Size]:
    folder: Path = tmp_path_factory.mktemp("backends")
    latent, plain = latent_model(folder / "latent"), plain_model(folder / "plain")
    asked: list[dict[str, Any]] = [
        {
            "model": str(latent if model.latent else plain),
            "backend": name,
            "place": place.name,
            "gamma": gamma,
            "batches": batches,
            "context": model.context,
            "page": page,
            "requests": model.requests,
        }
        for name, model, page, place, gamma, batches in CASES
    ]
    folder.joinpath("asked.json").write_text(json.dumps(asked))
    log = folder / "log"
    probe = forked(PROBE, ["asked.json", "found.json"], folder, {}, log)
    assert probe.wait(PATIENCE_SECONDS) == 0, log.read_text()[-4000:]
    found = json.loads(folder.joinpath("found.json").read_text())
    return [Size(built, captured) for built, captured in found]


@pytest.mark.parametrize(
    "index",
    range(len(CASES)),
    ids=[
        f"{name}{'-latent' if model.latent else ''}-{place.name.lower()}-{gamma}-{model.requests}"
        for name, model, _, place, gamma, _ in CASES
    ],
)
def test_a_backend_keeps_what_is_predicted(measured: list[Size], index: int) -> None:
    name, model, page, place, gamma, batches = CASES[index]
    model, found = replace(model, page=page), measured[index]
    if place is Place.STEP:
        predicted, instances = draft_passes(name, gamma, batches, model), gamma - 1
    else:
        predicted, instances = backend(name, model).size(model, Use(place, gamma, batches)), 1
    planned = PLANNED.get((name, place), (0, 0)) if model.latent else (0, 0)
    built = found.built + instances * planned[0] * 8 * MIB
    captured = found.captured + instances * planned[1] * len(batches) * 8 * MIB
    # What is left out: a few numbers for each request.
    few = instances * (8192 + 32 * model.requests)
    assert 0 <= built - predicted.built <= few
    if name == "flashinfer" and model.latent and place is Place.EXTEND:
        assert predicted.captured == 0  # SGLang does not capture it
    else:
        assert 0 <= captured - predicted.captured <= few

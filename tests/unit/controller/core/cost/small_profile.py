"""A profile of two cells."""

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Fingerprint

FINGERPRINT = Fingerprint("qwen3", engine="sglang", device="cpu", graph_batch_sizes=(1, 2))


PROFILE = Profile(
    FINGERPRINT,
    (DrafterIdentity("mtp", "models/draft", "r1"),),
    128.0,
    1e-7,
    (ProfileCell("mtp", 0, 1, 0.01, 0.001, 20), ProfileCell("mtp", 2, 1, 0.02, 0.001, 20)),
    measured_at="2026-01-01T00:00:00Z",
)

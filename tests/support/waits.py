"""Lines of the plugin that would wait for a device on the scheduler's thread, and why they may.

The CPU engine lists them (CPU_ENGINE_SYNCHRONISATIONS).
"""

_CPU_ONLY = "A GPU is asked by `OnlineWeights.check_replaced`, on its side stream."
# Where weights serve by versions or learn online, and copies are not late.
WAITS = {
    "learning/online_weights.py sample: "
    "is_other_target = not torch.equal(borrowed, self._borrowed_sample): equal": _CPU_ONLY,
    "learning/online_weights.py sample: replaced = bool(self._weights.are_replaced()): __bool__"
    : _CPU_ONLY,
    "learning/student.py _require_written: "
    "if not torch.equal(live, weights[name].to(live.dtype)):: equal"
    : "Weights are compared on the CPU only.",
}  # fmt: skip

"""Lines of the plugin that would wait for a device on the scheduler's thread, and why they may.

The CPU engine lists them (CPU_ENGINE_SYNCHRONISATIONS).
"""

_CPU_ONLY = "Online updates are refused on every device but the CPU, where nothing is waited for."
WAITS = {
    "learning/online_updates.py after_verify: "
    "accepted: list[int] = found.result.accept_lens.tolist() if drafted or stride else []: tolist"
    : _CPU_ONLY,
    "learning/online_updates.py after_verify: "
    "ready = self._windows.add(found, found.batch.seq_lens.tolist(), accepted): tolist": _CPU_ONLY,
    "learning/weights.py were_replaced: if torch.equal(self._sample(), self._served):: equal"
    : _CPU_ONLY + "  Nobody else asks whether weights were replaced.",
    "learning/online_weights.py look: "
    "is_other = not torch.equal(borrowed, self._borrowed_seen): equal": _CPU_ONLY,
    "learning/weights.py _compare: "
    "if not torch.equal(live, weights[name].to(live.dtype)):: equal"
    : "Weights are compared on the CPU only.",
}  # fmt: skip

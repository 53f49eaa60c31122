"""The SGLang plugin: lets a sidecar choose the draft length of every decode step.

Entry point `speculation_controller` of the group `sglang.srt.plugins`, see `plugin.register`.  Off
unless SPECULATION_SIDECAR is set.  What belongs to one version of SGLang is in `surface`.
"""

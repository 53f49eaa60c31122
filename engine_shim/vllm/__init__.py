"""The vLLM plugin: lets a sidecar choose the draft length of every decode step.

Its entry point is `speculation_controller` of the group `vllm.general_plugins`, see
`plugin.register`; it is off unless SPECULATION_SIDECAR is set.
"""

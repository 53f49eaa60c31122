"""The engine's side of the connection to the sidecar.

A sequenced-packet socket pair connects the engine's process to an agent process, which talks gRPC.
An engine uses `engine_link.EngineLink`, `plan_follower.StepChoice` and `settings.LinkSettings`.
(Nothing is imported here, so the agent imports only the modules that it needs.)
"""

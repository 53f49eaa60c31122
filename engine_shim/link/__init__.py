"""The engine's side of the conversation with the sidecar.

One sequenced-packet socket pair joins the engine's process to an agent process that speaks gRPC.
An engine uses `engine_link.EngineLink`, `plan_follower.StepChoice` and `settings.LinkSettings`.
(Nothing is imported here, so that the agent imports only what it needs.)
"""

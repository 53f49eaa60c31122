"""Converts what was found wrong with an engine to protobuf."""

from controller.core.checks.engine_checks import EngineWarning
from controller.wire.field_mapping import message_of
from speculation.v1 import service_pb2


def warning_to_proto(warning: EngineWarning) -> service_pb2.EngineWarning:
    """The warning in words; its kind as logs and metrics name it."""
    return message_of(service_pb2.EngineWarning, warning, kind=warning.kind.value)

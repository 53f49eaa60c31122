"""Serves gRPC reflection in v1alpha and v1, which differ only in the package of their messages.

grpcio-reflection has v1alpha only.  Clients try v1 first, and some support nothing else.
"""

from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE = f"{_V1}.ServerReflection"
_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Adds reflection of these services, and of itself, to a server."""
    _register_v1_description()
    names = (*services, reflection.SERVICE_NAME, SERVICE)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    reflection.enable_server_reflection(names, server)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {"ServerReflectionInfo": handler})]
    )


def _register_v1_description() -> None:
    """Adds the description of v1 to the pool from which reflection answers."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        file_proto = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file_proto)
        file_proto.name, file_proto.package = _FILE, _V1
        # The options mark v1alpha as deprecated.
        file_proto.ClearField("options")
        for field in (field for message in file_proto.message_type for field in message.field):
            if field.type_name:
                field.type_name = _renamed(field.type_name)
        for service in file_proto.service:
            for method in service.method:
                method.input_type = _renamed(method.input_type)
                method.output_type = _renamed(method.output_type)
        pool.AddSerializedFile(file_proto.SerializeToString())


def _renamed(name: str) -> str:
    return name.replace(f".{_ALPHA}.", f".{_V1}.", 1)

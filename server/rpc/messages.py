"""Message classes of the Open Inference Protocol v2, in a descriptor pool of their own.

`tritonclient` and other clients put the same names (`inference.ModelInferRequest`, ...) into protobuf's
default pool, which takes each name once: whoever imports second fails. A pool of our own lets a process
be server and client, and a descriptor instead of generated code runs with any protobuf from 5 up.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
DESCRIPTOR = "inference.binpb"


def _files() -> "descriptor_pb2.FileDescriptorSet":
    found = resources.files(__package__).joinpath("proto", DESCRIPTOR).read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(found)


def _load(pool: "descriptor_pool.DescriptorPool") -> dict[str, Any]:
    classes: dict[str, Any] = {}
    for file in _files().file:
        pool.AddSerializedFile(file.SerializeToString())
        for message in file.message_type:
            name = f"{file.package}.{message.name}"
            classes[message.name] = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    return classes


POOL = descriptor_pool.DescriptorPool()
MESSAGES: Mapping[str, Any] = _load(POOL)
"""Message class by its name in `inference.proto`, such as `"ModelInferRequest"`."""

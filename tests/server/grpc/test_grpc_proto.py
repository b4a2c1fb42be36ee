"""The protocol's descriptor: the committed one is the compiled one, and has other clients' fields."""

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from servax.server.rpc.messages import MESSAGES
from tritonclient.grpc import service_pb2

PROTO = resources.files("servax.server.rpc") / "proto"


def fields(descriptor: Any) -> dict[str, tuple[int, int, bool, str]]:
    return {
        one.name: (one.number, one.type, one.is_repeated, one.message_type.name if one.message_type else "")
        for one in descriptor.fields
    }


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_fields_are_those_of_tritonclient(name: str) -> None:
    ours, theirs = MESSAGES[name].DESCRIPTOR, getattr(service_pb2, name).DESCRIPTOR
    assert ours.full_name == theirs.full_name
    assert fields(ours).items() <= fields(theirs).items()
    for nested in ours.nested_types:
        assert fields(nested).items() <= fields(theirs.nested_types_by_name[nested.name]).items()


def test_the_committed_descriptor_is_the_compiled_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the compiler is not installed")
    out = tmp_path / "inference.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--descriptor_set_out={out}"]
    subprocess.run([*command, str(PROTO / "inference.proto")], check=True, timeout=60)
    compiled, committed = (
        descriptor_pb2.FileDescriptorSet.FromString(content)
        for content in (out.read_bytes(), (PROTO / "inference.binpb").read_bytes())
    )
    assert compiled == committed

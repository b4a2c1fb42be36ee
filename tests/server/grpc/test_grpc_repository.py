"""The model-repository extension over gRPC, through tritonclient."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from servax.server.errors import Overloaded
from servax.server.rpc.messages import MESSAGES
from servax.server.rpc.service import create_grpc_server
from servax.server.rpc.testing import running_grpc
from tritonclient.utils import InferenceServerException


def test_tritonclient_reads_the_index(site: Any) -> None:
    site.ragged.ready = False
    found = {one.name: one for one in site.client.get_model_repository_index().models}
    assert set(found) == set(site.engine.models)
    assert (found["double"].version, found["double"].state, found["double"].reason) == ("1", "READY", "")
    assert found["ragged"].state == "LOADING"
    assert "answers once it is warm" in found["ragged"].reason
    call, kind = site.call("RepositoryIndex"), MESSAGES["RepositoryIndexRequest"]
    answer = MESSAGES["RepositoryIndexResponse"]
    ready = answer.FromString(call(kind(ready=True).SerializeToString())).models
    assert {one.name for one in ready} == set(found) - {"ragged"}
    assert not answer.FromString(call(kind(repository_name="other").SerializeToString())).models
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda client: client.load_model("double"), "--allow-load"),
        (lambda client: client.unload_model("double"), "restart the server"),
    ],
)
def test_nothing_is_changed_unless_the_server_was_told_to_allow_it(
    site: Any, change: Callable[[Any], None], said: str
) -> None:
    with pytest.raises(InferenceServerException, match=said) as caught:
        change(site.client)
    assert caught.value.status() == "StatusCode.PERMISSION_DENIED"


def test_tritonclient_has_a_model_loaded_anew(site: Any) -> None:
    asked: list[str] = []

    async def load(name: str) -> None:
        if asked:
            raise Overloaded("models are loaded one after another; one is on its way: retry later")
        asked.append(name)

    with running_grpc(lambda: create_grpc_server(site.engine, load=load)) as address:
        client = triton.InferenceServerClient(address)
        for change, code in (
            (lambda: client.load_model("no"), "NOT_FOUND"),
            (lambda: client.load_model("double", config="{}"), "INVALID_ARGUMENT"),
            (lambda: client.unload_model("double"), "PERMISSION_DENIED"),
            (lambda: client.load_model("double"), ""),
            (lambda: client.load_model("double"), "RESOURCE_EXHAUSTED"),
        ):
            if not code:
                change()
                continue
            with pytest.raises(InferenceServerException) as caught:
                change()
            assert caught.value.status() == f"StatusCode.{code}"
        client.close()
    assert asked == ["double"]

"""A servable of a Flax NNX module."""

from typing import Any

from .errors import SignatureError
from .servable import Servable, check_call


def from_nnx(module: Any, **options: Any) -> Servable:
    """Make a servable of a Flax NNX module.

    The module is split into its structure and its state; the state is the servable's parameters. It is
    served in evaluation mode (``module.eval()`` is called), and changes that a call makes to the state are
    dropped.

    Args:
        module: a `flax.nnx.Module` whose ``__call__`` takes the declared inputs as keywords.
        options: everything else that `Servable` takes.

    Raises:
        SignatureError: if it is no NNX module.
    """
    from flax import nnx

    if not isinstance(module, nnx.Module):
        raise SignatureError(
            f"from_nnx takes a flax.nnx.Module; got {type(module).__name__}: pass any other function to "
            f"servax.Servable(apply, params, ...)"
        )
    check_call(module.__call__, [], options.get("inputs", ()))
    module.eval()
    graphdef, state = nnx.split(module)

    def apply(params: Any, **inputs: Any) -> Any:
        return nnx.merge(graphdef, params)(**inputs)

    return Servable(apply, state, **options)

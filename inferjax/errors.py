"""The errors users see: each says what happened, why, and how to fix it, with the numbers."""


class InferjaxError(Exception):
    """The base of every error raised on purpose.

    Facts given as keywords become attributes, for callers that branch on numbers instead of text.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", **facts: object) -> None:
        self.what, self.why, self.fix, self.facts = what, why, fix, facts
        parts = [what, f"Why: {why}" if why else "", f"Fix: {fix}" if fix else ""]
        super().__init__("\n  ".join(part for part in parts if part))

    def __getattr__(self, name: str) -> object:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(name)


class UnsupportedModel(InferjaxError):
    """The model family or one of its variants is not implemented."""


class UnsupportedConfig(InferjaxError):
    """A configuration key or value that would change the result is not understood."""


class CheckpointError(InferjaxError):
    """A checkpoint's bytes are damaged, unsafe, incomplete or inconsistent with its config."""


class HubUnreachable(CheckpointError):
    """The Hugging Face Hub gave no answer, and its cache lacks the model."""


class CatalogError(InferjaxError):
    """A catalog model is unknown, could not be fetched, or failed its checksum."""


class TokenizerError(InferjaxError):
    """A vocabulary cannot be built or a text cannot be encoded with it."""


class TemplateError(InferjaxError):
    """A chat template is missing, unsafe, too slow, or refuses the messages."""


class ShapeError(InferjaxError):
    """An array argument has the wrong shape or dtype."""


class InvalidSampling(InferjaxError):
    """A sampling field has a value outside its range, or is unknown."""


class InvalidInput(InferjaxError):
    """A prompt or token sequence cannot be run as given."""


class RequestTooLong(InvalidInput):
    """Prompt plus requested tokens do not fit the model's context or the cache."""


class OutOfPages(InferjaxError):
    """The page pool or a block table is too small for the sequence."""


class PageError(InferjaxError):
    """Page accounting is broken: a bug in the caller, not in a request."""


class NonFiniteLogits(InferjaxError):
    """The model produced NaN logits for a sequence."""


class KernelUnavailable(InferjaxError):
    """The requested kernel implementation cannot run here."""


class MissingPackage(InferjaxError):
    """An optional package is needed and not installed."""


class ShardingError(InferjaxError):
    """A mesh does not divide a model, or the devices it is made of."""


class UnknownChip(InferjaxError):
    """No chip of that name is in the planner's table."""


class DoesNotFit(InferjaxError):
    """A model does not fit the memory of the chips; says by how much, and what would."""


class EngineFull(InferjaxError):
    """As many requests wait as the engine accepts."""


class UnexpectedCompilation(InferjaxError):
    """A program was compiled after the warm-up."""


class RankLost(InferjaxError):
    """A process of several that run together ended with an error, and the others with it."""


class PackedWeightsWarning(UserWarning):
    """Packed weights were loaded where the kernels that make them fast are missing."""

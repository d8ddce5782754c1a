"""The one way in which a kernel says that it cannot run here."""


class KernelUnavailable(NotImplementedError):
    """An implementation asked for by name cannot run here; the message says why and what helps."""


__all__ = ["KernelUnavailable"]

"""Errors that Offbeat raises on purpose, in the user's words. Each one is an `OffbeatError`."""


class OffbeatError(RuntimeError):
    """Base class of all errors that Offbeat raises on purpose."""


class SettingError(OffbeatError, ValueError):
    """A name or a value from the user cannot be used; the message lists what can."""


class LaunchError(OffbeatError):
    """The processes were not started as training needs, or do not belong together."""


class MismatchError(OffbeatError):
    """The ranks do not train the same model, or do not run the same strategy."""


class RankLost(OffbeatError):
    """Another rank died, does not answer or has left; the message names the rank."""


class RankDropped(RankLost):
    """The other ranks went on without this one, which was silent; attach again to join them."""


class DataError(OffbeatError):
    """A data set is missing, truncated or of the wrong shape; the message says what to do."""

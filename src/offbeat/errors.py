"""What can go wrong, in the user's words. Every error of ours is an `OffbeatError`."""


class OffbeatError(RuntimeError):
    """The base of all errors that Offbeat raises on purpose."""


class SettingError(OffbeatError, ValueError):
    """A name or a value that a user gave cannot be used; the message says what can."""


class LaunchError(OffbeatError):
    """The processes were not started, or do not belong together, as training needs."""


class MismatchError(OffbeatError):
    """The ranks do not hold the same model, or do not run the same strategy."""


class RankLost(OffbeatError):
    """Another rank died, fell silent or left; the message names it."""


class DataError(OffbeatError):
    """A data set is missing, truncated or of the wrong shape; the message says what to type."""

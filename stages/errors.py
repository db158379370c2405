"""The errors that explain themselves; whoever raises one says what was expected and what to do."""


class InputError(ValueError):
    """Bad data or a bad setting: names the file, row, column or key, and the way out."""


class Shortage(RuntimeError):
    """Dynamic sampling ended its rounds without a full batch."""


class Exhausted(Shortage):
    """Every prompt was asked as often as it may be."""


class NonFinite(RuntimeError):
    """A loss, gradient norm or weight stopped being a number; nothing was saved."""


class EngineMismatch(RuntimeError):
    """The sampler does not run the policy that it claims to run."""


class OutOfMemory(RuntimeError):
    """The device or the machine has less memory than was asked for; nothing was saved."""


class StorageError(RuntimeError):
    """The store failed, for longer than it was worth trying; the same command goes on."""

"""What can go wrong with a model, before it serves. Each message says what was found, where, and what to do.

ModelError                    any of these: the service prints the message and exits
├── ModelNotFound             no such folder, file or hub id; offline and not in the cache
├── BadCheckpoint             the files contradict themselves: missing, unused or misshapen tensors, broken JSON or GGUF
├── UnknownArchitecture       the network is not one of ours
├── UnsupportedFeature        the network is ours, but asks for something that is not built (never run half right)
└── OutOfDeviceMemory         weights, steps and at least one frame do not fit the device
CannotResize                  an operator asked for a pool or swap area of another size, and it is not to be had
"""


class ModelError(Exception):
    """A model that cannot be served. The message is for the person who started the server."""


class ModelNotFound(ModelError):
    """There is nothing at the place the setting names."""


class BadCheckpoint(ModelError):
    """The files are there, but not a whole and consistent model."""


class UnknownArchitecture(ModelError):
    """config.json names a network that is not built here."""


class OutOfDeviceMemory(ModelError):
    """The device has no room for what must be on it."""


class NoNativeKernels(ModelError):
    """There is no C++ compiler, it failed, or what it wrote cannot be loaded."""


class CannotResize(Exception):
    """A pool or a swap area cannot have another size while the server runs. The message is for operators."""


class UnsupportedFeature(ModelError):
    """config.json asks for a variant that would be computed wrongly, so it is refused."""

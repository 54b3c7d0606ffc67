"""Whether this project's `cuda` package can be imported at all.

`cuda` is a namespace: our folder, and what NVIDIA's packages install under the same name, are one package to Python. A
regular package of that name (a folder with an `__init__.py`, as old distributions shipped) anywhere on the path hides
them all, and the errors that follow name everything but the cause.
"""

from importlib.util import find_spec

from model.errors import ModelError


class CudaNamespaceHidden(ModelError):
    """Another package named `cuda` hides ours. The message says which."""


def check_cuda_namespace() -> None:
    """Raises CudaNamespaceHidden. Call it before the first import from `cuda`."""
    spec = find_spec("cuda")
    if spec is not None and spec.origin is not None:
        raise CudaNamespaceHidden(
            f"the package `cuda` is hidden by {spec.origin}: remove the distribution that installed it "
            "(cuda-python before 12.8 did), or take its folder off PYTHONPATH"
        )

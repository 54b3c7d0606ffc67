"""What a front end knows of the model that it serves, and how it reaches the engine: one frozen object.

It is made once the weights are loaded; before that a front end answers 503 (`service/api.py`).
"""

from dataclasses import dataclass

from model.step_plan import SamplingParameters
from service.engine_client import LocalEngineClient
from service.errors import NotFound, quoted
from service.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model, its names, its tokenizer and its engine."""

    names: tuple[str, ...]  # at least one; the first is the default
    root: str  # where it came from: a hub id with its revision, or a path
    created: int  # unix time, seconds
    end_ids: tuple[int, ...]  # any of these ends a Sequence
    defaults: SamplingParameters  # from the model's generation settings; the seed is not used
    tokenizer: Tokenizer
    client: LocalEngineClient
    dtype: str  # of weights, keys and values
    weights_bytes: int

    def check_name(self, name: str | None) -> str:
        """The name to answer with: `name` if it is served, the first one for None. Raises NotFound."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise NotFound(f"The model `{quoted(name)}` does not exist.", param="model")
        return name

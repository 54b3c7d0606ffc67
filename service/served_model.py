"""What a front end knows of the model that it serves, and how it reaches the engine: one frozen object.

It is made once the weights are loaded; before that a front end answers 503 (`service/api.py`). `ModelFacts` are what
travels to a front end in a process of its own, which loads the tokenizer itself.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from model.step_plan import SamplingParameters
from service.call_readers import CallFormatSetting
from service.engine_client import EngineClient
from service.errors import NotFound, quoted
from service.grammars import Grammars
from service.tokenization import Tokenizer


class TokenizerFiles(msgspec.Struct, frozen=True):
    """What a tokenizer is loaded from."""

    folder: str
    chat_template: str | None  # its text, in place of the model's own
    embedded: int  # ids that the model has an embedding for
    tool_call_format: CallFormatSetting = "auto"

    def load(self) -> Tokenizer:
        """Takes a second. Raises TokenizerNotUsable, OSError."""
        return Tokenizer.load(Path(self.folder), self.chat_template, self.embedded, self.tool_call_format)


class ModelFacts(msgspec.Struct, frozen=True):
    """The fields of ServedModel that are plain data."""

    names: tuple[str, ...]
    root: str
    created: int
    end_ids: tuple[int, ...]
    defaults: SamplingParameters
    dtype: str
    weights_bytes: int

    def served(self, tokenizer: Tokenizer, client: EngineClient, grammars: Grammars | None = None) -> "ServedModel":
        """grammars: None for one of its own."""
        return ServedModel(
            names=self.names,
            root=self.root,
            created=self.created,
            end_ids=self.end_ids,
            defaults=self.defaults,
            tokenizer=tokenizer,
            client=client,
            grammars=grammars or Grammars(tokenizer, client.limits.vocabulary, self.end_ids),
            dtype=self.dtype,
            weights_bytes=self.weights_bytes,
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model, its names, its tokenizer and its engine."""

    names: tuple[str, ...]  # at least one; the first is the default
    root: str  # where it came from: a hub id with its revision, or a path
    created: int  # unix time, seconds
    end_ids: tuple[int, ...]  # any of these ends a Sequence
    defaults: SamplingParameters  # from the model's generation settings; the seed is not used
    tokenizer: Tokenizer
    client: EngineClient
    grammars: Grammars
    dtype: str  # of weights, keys and values
    weights_bytes: int

    def check_name(self, name: str | None) -> str:
        """The name to answer with: `name` if it is served, the first one for None. Raises NotFound."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise NotFound(f"The model `{quoted(name)}` does not exist.", param="model")
        return name

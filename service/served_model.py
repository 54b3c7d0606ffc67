"""What a front end knows of the model that it serves, and how it reaches the engine: one frozen object.

It is made once the weights are loaded; before that a front end answers 503 (`service/api.py`). `ModelFacts` are what
travels to a front end in a process of its own, with what the tokenizer is made of (`TokenizerFiles`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from model.step_plan import SamplingParameters
from service.call_readers import CallFormatSetting
from service.engine_client import EngineClient
from service.errors import NotFound, quoted
from service.grammars import Grammars
from service.tokenization import Tokenizer, TokenizerNotUsable, read_files


class TokenizerFiles(msgspec.Struct, frozen=True):
    """What a tokenizer is made of: all front ends have the same, whatever becomes of the model's folder meanwhile."""

    folder: str  # where they were: for messages
    files: dict[str, bytes]  # by name, as they were at the start: tens of MB at most
    chat_template: str | None  # its text, in place of the model's own
    embedded: int  # ids that the model has an embedding for
    tool_call_format: CallFormatSetting = "auto"

    @classmethod
    def read(
        cls, folder: Path, chat_template: str | None, embedded: int, tool_call_format: CallFormatSetting = "auto"
    ) -> Self:
        """Those of a model's folder. Raises TokenizerNotUsable, OSError."""
        return cls(str(folder.absolute()), read_files(folder), chat_template, embedded, tool_call_format)

    def load(self) -> Tokenizer:
        """Takes a second. Raises TokenizerNotUsable."""
        try:
            return Tokenizer.of(self.files, self.chat_template, self.embedded, self.tool_call_format)
        except TokenizerNotUsable as error:
            raise TokenizerNotUsable(f"{self.folder}: {error}") from error


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
            served = ", ".join(f"`{each}`" for each in self.names)
            message = f"The model `{quoted(name)}` does not exist: this server has {quoted(served)}."
            raise NotFound(message, param="model")
        return name

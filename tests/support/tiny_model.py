"""A folder that is a model: a tiny llama with a tokenizer and a chat template. Its weights are random (`dummy`)."""

import json
from pathlib import Path
from typing import Any

from tiny_tokenizer import CHATML, END, tiny_tokenizer

from model.loader import random_parameters
from model.parameters import Parameters

POSITIONS = 100_000


def write_tiny_model(folder: Path, layers: int = 1, **fields: Any) -> Path:
    """Fill an empty folder; returns it. fields: of config.json, in place of those below."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tiny_tokenizer().vocabulary,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": END,
    } | fields
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return folder


def attentive_parameters(*arguments: Any) -> Parameters:
    """In place of model.loader.random_parameters: large weights, so that answers depend on every page.

    Of small ones the last token alone decides, and with one layer keys and values depend on their own token alone: it
    takes two for a wrong page to be seen wherever it is.
    """
    parameters = random_parameters(*arguments)
    for layer in parameters.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            linear.weight *= 12
    return parameters

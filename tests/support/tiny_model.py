"""A folder that is a model: a tiny llama with a tokenizer and a chat template. Its weights are random (`dummy`)."""

import json
from pathlib import Path

from tiny_tokenizer import CHATML, END, tiny_tokenizer

POSITIONS = 100_000


def write_tiny_model(folder: Path) -> Path:
    """Fill an empty folder; returns it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tiny_tokenizer().vocabulary,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return folder

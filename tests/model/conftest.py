"""Tiny random models of each family, made by transformers and saved as folders: its logits are the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


@dataclass
class Tiny:
    """A folder, and the model that transformers saved there."""

    folder: Path
    reference: Any

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.reference(torch.tensor([ids])).logits[0]

    @torch.inference_mode()
    def generate(self, ids: list[int], tokens: int) -> list[int]:
        out = list(ids)
        for _ in range(tokens):
            out.append(int(self.logits(out)[-1].argmax()))
        return out[len(ids) :]


MakeTiny = Callable[..., Tiny]


@pytest.fixture
def tiny(tmp_path: Path) -> MakeTiny:
    """tiny("Qwen3", head_dim=80, …): a random model with those fields of its config."""

    def make(family: str = "Llama", *, seed: int = 0, folder: str = "tiny", **fields: Any) -> Tiny:
        import transformers

        settings = {
            "vocab_size": 211,
            "hidden_size": 96,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.15,  # large enough for logits that differ
            "sliding_window": None,
            **({"head_dim": 16} if family == "Qwen3" else {}),
            **fields,
        }
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # transformers starts biases at 0, which would hide a forgotten one
                    parameter.normal_(0, 0.3)
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        model.save_pretrained(tmp_path / folder)
        return Tiny(tmp_path / folder, model)

    return make

"""The parameters of a network, fused as the forward pass uses them, and the names they have in a checkpoint.

    fused here                          stored as (one row range each, in this order)
    layers[i].qkv                       self_attn.q_proj, k_proj, v_proj
    layers[i].gate_up                   mlp.gate_proj, up_proj
    every other field                   one tensor

Owns: `parts_of`, the one list of what a checkpoint must hold, used to load, to count and to make random weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig


@dataclass(slots=True)
class Linear:
    """y = x @ weight.T + bias. weight (outputs, inputs); bias (outputs,) or None.

    Kernels may replace `weight` by their own packed form (`Kernels.prepare`), so nobody else reads it after that.
    """

    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class LayerParameters:
    """One layer, top to bottom."""

    input_norm: Tensor  # (hidden,)
    qkv: Linear  # ((H + 2 KH) D, hidden): queries, keys, values
    q_norm: Tensor | None  # (D,)
    k_norm: Tensor | None  # (D,)
    output: Linear  # (hidden, H D)
    mlp_norm: Tensor  # (hidden,)
    gate_up: Linear  # (2 intermediate, hidden): gate, up
    down: Linear  # (hidden, intermediate)


@dataclass(slots=True)
class Parameters:
    """The whole network. With tied embeddings `head.weight` is `embedding` itself: one tensor, counted once."""

    embedding: Tensor  # (V, hidden)
    layers: list[LayerParameters]
    norm: Tensor  # (hidden,)
    head: Linear  # (V, hidden)

    def size_bytes(self) -> int:
        """Bytes of all tensors, each storage once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._tensors()
        }
        return sum(storages.values())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.norm, self.head.weight)
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                yield linear.weight
                if linear.bias is not None:
                    yield linear.bias
            for vector in (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm):
                if vector is not None:
                    yield vector


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor: its name and shape in the checkpoint, and the place that it fills."""

    name: str
    shape: tuple[int, ...]
    target: Tensor


def allocate(config: ModelConfig, dtype: torch.dtype, device: str | torch.device) -> Parameters:
    """Parameters with undefined contents: `parts_of` lists what must be filled."""

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear(tensor(outputs, inputs), tensor(outputs) if bias else None)

    c = config
    qkv_rows = (c.heads + 2 * c.kv_heads) * c.head_dim
    embedding = tensor(c.vocabulary, c.hidden)
    return Parameters(
        embedding=embedding,
        layers=[
            LayerParameters(
                input_norm=tensor(c.hidden),
                qkv=linear(qkv_rows, c.hidden, c.qkv_bias),
                q_norm=tensor(c.head_dim) if c.qk_norm else None,
                k_norm=tensor(c.head_dim) if c.qk_norm else None,
                output=linear(c.hidden, c.heads * c.head_dim, c.output_bias),
                mlp_norm=tensor(c.hidden),
                gate_up=linear(2 * c.intermediate, c.hidden, c.mlp_bias),
                down=linear(c.hidden, c.intermediate, c.mlp_bias),
            )
            for _ in range(c.layers)
        ],
        norm=tensor(c.hidden),
        head=Linear(embedding) if c.tied_embeddings else Linear(tensor(c.vocabulary, c.hidden)),
    )


def parts_of(config: ModelConfig, parameters: Parameters) -> list[Part]:
    """Every tensor that a checkpoint of this network stores, with the rows of `parameters` that it fills.

    The targets are disjoint and cover every parameter, so "each part filled exactly once" fills everything once.
    """
    parts = [_part("model.embed_tokens.weight", parameters.embedding), _part("model.norm.weight", parameters.norm)]
    if not config.tied_embeddings:
        parts.append(_part("lm_head.weight", parameters.head.weight))
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for index, layer in enumerate(parameters.layers):
        prefix = f"model.layers.{index}."
        parts.append(_part(prefix + "input_layernorm.weight", layer.input_norm))
        parts.append(_part(prefix + "post_attention_layernorm.weight", layer.mlp_norm))
        attention = [(name, prefix + f"self_attn.{name}_proj") for name in ("q", "k", "v")]
        parts += _linear_parts([name for _, name in attention], [q_rows, kv_rows, kv_rows], layer.qkv)
        parts += _linear_parts([prefix + "self_attn.o_proj"], [config.hidden], layer.output)
        parts += _linear_parts(
            [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"], [config.intermediate] * 2, layer.gate_up
        )
        parts += _linear_parts([prefix + "mlp.down_proj"], [config.hidden], layer.down)
        if layer.q_norm is not None and layer.k_norm is not None:
            parts.append(_part(prefix + "self_attn.q_norm.weight", layer.q_norm))
            parts.append(_part(prefix + "self_attn.k_norm.weight", layer.k_norm))
    return parts


def random_parameters(
    config: ModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
) -> Parameters:
    """Weights for benchmarks and tests: normal with deviation 0.02, norms 1, biases normal. Same seed, same weights."""
    generator = torch.Generator(device=device).manual_seed(seed)
    parameters = allocate(config, dtype, device)
    for part in parts_of(config, parameters):
        if part.name.endswith("norm.weight"):
            part.target.fill_(1.0)
        else:
            part.target.normal_(0.0, 0.02, generator=generator)
    return parameters


def _part(name: str, target: Tensor) -> Part:
    return Part(name, tuple(target.shape), target)


def _linear_parts(names: list[str], rows: list[int], linear: Linear) -> list[Part]:
    parts = [_part(f"{name}.weight", target) for name, target in zip(names, linear.weight.split(rows), strict=True)]
    if linear.bias is not None:
        parts += [_part(f"{name}.bias", target) for name, target in zip(names, linear.bias.split(rows), strict=True)]
    return parts

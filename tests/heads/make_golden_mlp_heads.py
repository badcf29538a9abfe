"""Writes the golden files of Medusa and MLPSpeculator: python -m tests.heads.make_golden_mlp_heads

Their owners' libraries (FasterDecoding/Medusa, fms-extras, vLLM) cannot be installed beside today's transformers, so
the classes here are a reference implementation, written from the owners' public code and from nothing of this project:
the same modules, the same names of tensors, and their own order of computation (drafted tokens known in advance). It
cannot reveal a misreading that both share.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.heads import golden_files

HIDDEN, VOCAB, NUM_LAYERS = 16, 40, 2
COMMITTED = 6


class ResBlock(nn.Module):
    """FasterDecoding's block: one linear layer with a bias."""

    def __init__(self, bias=True):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x):
        return x + self.act(self.linear(x))


class LayerNormParameterized(nn.Module):
    """The norm of fms, which does not subtract the mean, and has a scale and a shift, or neither."""

    def __init__(self, size, parameters=True):
        super().__init__()
        if parameters:
            self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * self.weight + self.bias if hasattr(self, "weight") else x


class MLPSpeculator(nn.Module):
    """The model of fms-extras with its training forward, in which each head sees the text's real token."""

    def __init__(self, emb_dim, inner_dim, n_predict, scale_input):
        super().__init__()
        inner = inner_dim or emb_dim
        self.emb = nn.ModuleList([nn.Embedding(VOCAB, inner) for _ in range(n_predict)])
        self.proj = nn.ModuleList([nn.Linear(inner if i else emb_dim, inner, bias=False) for i in range(n_predict)])
        self.head = nn.ModuleList([nn.Linear(inner, VOCAB, bias=False) for _ in range(n_predict)])
        self.ln = nn.ModuleList([LayerNormParameterized(inner) for _ in range(n_predict)])
        self.ln0 = LayerNormParameterized(emb_dim, parameters=False) if scale_input else None
        self.state_weight = 0.5 ** (0.5 / n_predict)
        self.emb_weight = math.sqrt(1 - self.state_weight**2) * math.sqrt(inner / 2)
        self.activation = nn.GELU()

    def tie(self):
        for i in range(1, len(self.emb)):
            self.emb[i], self.head[i], self.ln[i] = self.emb[0], self.head[0], self.ln[0]
            self.proj[i] = self.proj[1]
        return self

    def forward(self, state, token_ids):
        if self.ln0 is not None:
            state = self.ln0(state) / (2**0.5)
        found = []
        for i in range(len(self.emb)):
            z = self.emb[i](token_ids[i : i + len(state)]).mul(self.emb_weight)
            state = self.activation(self.ln[i](self.proj[i](state) * self.state_weight + z))
            found.append(self.head[i](state))
        return torch.stack(found)  # [n_predict, num_positions, vocab]


def shaken(module, scale=0.5):
    """Sets random weights, since ones and zeros could hide mistakes."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.3 if parameter.ndim == 1 else 0.0, std=scale)
    return module


def target_files():
    names = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": 128,
    }
    return {name: torch.randn(shape) for name, shape in names.items()}, config


def text(num_depths):
    return torch.randint(0, VOCAB, (COMMITTED + num_depths - 1,)), torch.randn(COMMITTED - 1, HIDDEN)


def medusa(name, *, own_output, layers=1, bias=True, num_heads=3):
    """Writes a file of Medusa. With `own_output`, it is FasterDecoding's first version. The second version uses the
    target's output layer."""
    target, target_config = target_files()
    output = [nn.Linear(HIDDEN, VOCAB, bias=False)] if own_output else []
    heads = shaken(
        nn.ModuleList(
            nn.Sequential(
                *(ResBlock(bias) for _ in range(layers)), *(nn.Linear(HIDDEN, VOCAB, bias=False) for _ in output)
            )
            for _ in range(num_heads)
        )
    )
    token_ids, hidden = text(num_heads)
    states = [head(hidden[-1]) for head in heads]
    logits = torch.stack(states if own_output else [state @ target["lm_head.weight"].T for state in states])
    config = {"base_model_name_or_path": "any", "medusa_num_heads": num_heads, "medusa_num_layers": layers}
    golden_files.write(name, heads.state_dict(), config, target, target_config, token_ids, hidden, logits)


def medusa_of_vllm(name, *, num_heads=2, truncated=12):
    """Writes a file of vLLM's Medusa: layers without a bias, a part of the vocabulary, and scaled logits."""
    target, target_config = target_files()
    blocks = shaken(nn.ModuleList(ResBlock(bias=False) for _ in range(num_heads)))
    outputs = shaken(nn.ModuleList(nn.Linear(HIDDEN, VOCAB, bias=False) for _ in range(num_heads)))
    token_map = torch.randperm(VOCAB)[:truncated]
    token_ids, hidden = text(num_heads)
    states = [output(block(hidden[-1])) for block, output in zip(blocks, outputs, strict=True)]
    logits = torch.stack(states)[:, token_map] * 0.25
    tensors = {
        **{f"medusa_heads.blocks.{i}.layers.0.weight": block.linear.weight for i, block in enumerate(blocks)},
        **{f"lm_heads.{i}.weight": output.weight for i, output in enumerate(outputs)},
        "token_map": token_map,
    }
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": num_heads,
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": truncated,
        "logit_scale": 0.25,
    }
    golden_files.write(name, tensors, config, target, target_config, token_ids, hidden, logits)


def mlp_speculator(name, *, inner_dim, tie_weights, scale_input, prefix="", n_predict=3):
    target, target_config = target_files()
    model = shaken(MLPSpeculator(HIDDEN, inner_dim, n_predict, scale_input))
    tensors = dict((model.tie() if tie_weights else model).named_parameters())  # only the first of tied ones
    token_ids, hidden = text(n_predict)
    logits = model(hidden[-1:], token_ids[COMMITTED - 1 :])[:, 0]
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": HIDDEN,
        "inner_dim": inner_dim,
        "n_predict": n_predict,
        "vocab_size": VOCAB,
        "tie_weights": tie_weights,
        "scale_input": scale_input,
    }
    named = {prefix + key: value for key, value in tensors.items()}
    golden_files.write(name, named, config, target, target_config, token_ids, hidden, logits)


if __name__ == "__main__":
    torch.manual_seed(19)
    medusa("medusa-own-output", own_output=True, layers=2)
    medusa("medusa-targets-output", own_output=False)
    medusa_of_vllm("medusa-truncated")
    mlp_speculator("mlp-speculator", inner_dim=24, tie_weights=False, scale_input=False)
    mlp_speculator("mlp-speculator-tied", inner_dim=0, tie_weights=True, scale_input=True, prefix="speculator.")

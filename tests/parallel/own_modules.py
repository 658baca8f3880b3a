"""Modules that the project has no code for: four architectures of transformers, tiny, and one written here."""

import torch
from torch import nn

COMMON = {
    "vocab_size": 67,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
# Fused and transposed queries, keys and values with tied embeddings; grouped heads and a window; a scaled embedding
# with a padding token, capped logits and two kinds of layers; a norm over the whole width of the queries.
SETTINGS = {
    "gpt2": {"vocab_size": 67, "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64}
    | {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False},
    "mistral": COMMON | {"sliding_window": 4},
    "gemma2": COMMON | {"sliding_window": 4, "head_dim": 8, "pad_token_id": 0, "attn_implementation": "eager"},
    "olmo2": COMMON | {"pad_token_id": None},
}


def architecture(name):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SETTINGS[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


class Layer(nn.Module):
    """Attention with one norm for every head; two experts, of which each row takes one, so that a batch, or the part of
    it that a rank has, may leave one out; and a choice that gets no gradient."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.one, self.two, self.three = (nn.Linear(width, width) for _ in range(3))
        self.scale = nn.RMSNorm(self.size)
        self.out = nn.Linear(width, width)
        self.choice = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(2)
        )

    def forward(self, state):
        x = self.before(state)
        one, two, three = (
            each(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2)
            for each in (self.one, self.two, self.three)
        )
        mixed = nn.functional.scaled_dot_product_attention(self.scale(one), self.scale(two), three, is_causal=True)
        state = state + self.out(mixed.transpose(1, 2).flatten(2))
        x = self.between(state)
        chosen_B = self.choice(x.mean(1)).argmax(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen_B == number).any():
                made[chosen_B == number] = expert(x[chosen_B == number])
        return state + made


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(67, 32)
        self.rest = nn.ModuleList(Layer(32, 4) for _ in range(2))
        self.end = nn.Linear(32, 67)

    def forward(self, tokens):
        state = self.table(tokens)
        for layer in self.rest:
            state = layer(state)
        return self.end(state)


def net():
    torch.manual_seed(0)
    return Net()

"""Random transformers models of a few thousand weights, and a tokenizer with one token a byte."""

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_outputs import CausalLMOutput

MOE_KINDS = ["qwen3moe", "mixtral", "gptoss", "deepseekv3"]
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, " * 12

_SHARED = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# expert width 48: a multiple of 16 and not of 32, so that MX blocks have a short tail
_CONFIGS = {
    "qwen3moe": (Qwen3MoeConfig, {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": (
        Qwen2MoeConfig,
        {
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mixtral": (MixtralConfig, {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptoss": (
        GptOssConfig,
        {
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseekv3": (
        DeepseekV3Config,
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 48,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "head_dim": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "llama": (LlamaConfig, {"intermediate_size": 48, "tie_word_embeddings": False}),
}


def tiny_model(kind: str, **changes) -> PreTrainedModel:
    """A bf16 model in eval mode; the same weights on every call."""
    torch.manual_seed(0)
    if kind == "ungated":
        model = UngatedModel(UngatedConfig(**_SHARED, **changes))
    else:
        config, options = _CONFIGS[kind]
        model = AutoModelForCausalLM.from_config(config(**{**_SHARED, **options, **changes}))
    for parameter in model.parameters():  # biases and norms too, which initialization leaves at 0 and 1
        nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(torch.bfloat16).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, no merges, no special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


# A mixture of experts without a gate, the form of Nemotron-H


class UngatedConfig(PreTrainedConfig):
    model_type = "ungated"


@use_experts_implementation(has_gate=False)
class UngatedExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = 4
        self.up_proj = nn.Parameter(torch.empty(4, 48, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(4, config.hidden_size, 48))
        self.act_fn = ACT2FN["relu2"]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        each = self.act_fn(torch.einsum("th,eih->tei", hidden_states, self.up_proj))
        each = torch.einsum("tei,ehi->teh", each, self.down_proj)
        chosen = each.gather(1, top_k_index[..., None].expand(-1, -1, each.shape[-1]))
        return (chosen * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


class UngatedModel(PreTrainedModel):
    config_class = UngatedConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.experts = UngatedExperts(config)
        self.post_init()

    def forward(self, input_ids, use_cache=False):
        x = self.embed(input_ids).flatten(0, 1)
        values, ids = x[:, :4].float().softmax(-1).topk(2)
        y = (x + self.experts(x, ids, values)).view(*input_ids.shape, -1)
        return CausalLMOutput(logits=y @ self.embed.weight.T)

"""Models of other kinds of layers, small enough to be made by the tests; see tiny_model.py."""

from pathlib import Path

from .tiny_model import VOCABULARY, save_tiny


def make_tiny_qwen_next(target: Path) -> Path:
    """A Qwen3-Next: gated delta rule in three layers of four, so three groups of state and one of attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mlp_only_layers=[0, 1, 2],  # vLLM wants one layer with experts
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        dtype="bfloat16",
    )
    return save_tiny(Qwen3NextForCausalLM, config, target)


def make_tiny_deepseek(target: Path) -> Path:
    """A DeepSeek-V2 without experts: latents of 512 + 64 values, the only ones that vLLM's CPU kernels take."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    return save_tiny(DeepseekV2ForCausalLM, config, target)


def make_tiny_eagle(target_model: Path, draft: Path) -> Path:
    """An EAGLE head of one layer for a tiny Llama, whose embeddings and output it shares."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(target_model, num_hidden_layers=1, architectures=["LlamaForCausalLM"])
    config.save_pretrained(draft)
    torch.manual_seed(1)
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (hidden, hidden),
        "layers.0.self_attn.k_proj": (kv, hidden),
        "layers.0.self_attn.v_proj": (kv, hidden),
        "layers.0.self_attn.o_proj": (hidden, hidden),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    weights = {f"{name}.weight": (torch.randn(*shape) * 0.15).to(torch.bfloat16) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft

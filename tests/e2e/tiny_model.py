"""Models small enough to be made by the tests: random weights, and a tokenizer of made-up words."""

from pathlib import Path
from typing import Any

VOCABULARY = 512


def make_tiny_llama(target: Path) -> Path:
    """Write the model to `target`. Two KV heads, so that it also splits over two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        # Wide enough that attention is far from uniform: a wrong byte of KV then shows in the log-probabilities.
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    return save_tiny(LlamaForCausalLM, config, target)


def save_tiny(model_class: Any, config: Any, target: Path) -> Path:
    """Write a model of that class with random weights, the same ones each time, and its tokenizer."""
    import torch

    torch.manual_seed(0)
    model_class(config).to(torch.bfloat16).save_pretrained(target)
    make_tokenizer(target)
    return target


def make_tiny_gemma(target: Path, window: int) -> Path:
    """A Gemma 3 of two sliding-window layers for each full-attention one: three KV groups over the same tensors."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=window,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    # Gemma's embeddings are scaled up and shared with the output: at full size each token would only repeat itself.
    model.model.embed_tokens.weight.data.mul_(0.25)
    model.to(torch.bfloat16).save_pretrained(target)
    make_tokenizer(target)
    return target


def make_tokenizer(target: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w2").save_pretrained(
        target
    )

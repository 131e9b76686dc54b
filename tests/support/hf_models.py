"""Tiny random models of Hugging Face transformers, for test_transformers.py: the names of their classes, and sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

VOCABULARY = 97


class Model(NamedTuple):
    """One architecture."""

    model: str  # the class of the model
    config: str  # the class of its configuration
    sizes: dict[str, Any]
    kind: str  # "decoder", "encoder", "pair" (encoder and decoder), "vision", "audio pair" or "two towers"
    # The implementation with the right results. Where the hidden states of padding choose blocks of keys, it is the one
    # whose padding sees nothing; eager attention's padding sees the mean of all values.
    oracle: str = "eager"


_WIDE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _WIDE | {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = _GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = _WIDE | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_INDEXED = _LATENT | {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "image_size": 16, "patch_size": 4}  # fmt: skip
_TOWERS = {"text_config": _WIDE | {"projection_dim": 16}, "vision_config": _VISION | {"projection_dim": 16},
           "projection_dim": 16}  # fmt: skip


def _decoder(name: str, sizes: dict[str, Any] = _GROUPED, **more: Any) -> Model:
    return Model(f"{name}ForCausalLM", f"{name}Config", sizes | more, "decoder")


def _encoder(name: str, sizes: dict[str, Any] = _WIDE, **more: Any) -> Model:
    return Model(f"{name}Model", f"{name}Config", sizes | more, "encoder")


MODELS = {
    # decoders
    "llama": _decoder("Llama"),
    "gpt2": Model("GPT2LMHeadModel", "GPT2Config", _GPT2, "decoder"),
    "mistral": _decoder("Mistral", sliding_window=5),
    "mixtral": _decoder("Mixtral", _EXPERTS, sliding_window=5, num_local_experts=4),
    "qwen2": _decoder("Qwen2"),
    "qwen2 with a window": _decoder("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen2_moe": _decoder("Qwen2Moe", _EXPERTS, num_experts=4, shared_expert_intermediate_size=24),
    "qwen3": _decoder("Qwen3"),
    "qwen3_moe": _decoder("Qwen3Moe", _EXPERTS, num_experts=4),
    "gemma": _decoder("Gemma"),
    "gemma2": _decoder("Gemma2", sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "gemma3": Model("Gemma3ForCausalLM", "Gemma3TextConfig", _GROUPED | {"sliding_window": 5,
                    "layer_types": ["sliding_attention", "full_attention"]}, "decoder"),
    "gpt_oss": _decoder("GptOss", _EXPERTS, sliding_window=5, num_local_experts=4),
    "deepseek_v2": _decoder("DeepseekV2", _LATENT),
    "deepseek_v3": _decoder("DeepseekV3", _LATENT),
    "opt": _decoder("OPT", _WIDE | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": _decoder("GPTNeoX", _WIDE),
    "gptj": _decoder("GPTJ", _GPT2 | {"rotary_dim": 4}),
    "gpt_bigcode": _decoder("GPTBigCode", _GPT2),
    "phi": _decoder("Phi", _WIDE),
    "phi3": _decoder("Phi3", sliding_window=5),
    "phimoe": _decoder("Phimoe", _EXPERTS, num_local_experts=4),
    "stablelm": _decoder("StableLm", _GROUPED),
    "starcoder2": _decoder("Starcoder2", sliding_window=5),
    "olmo": _decoder("Olmo"),
    "olmo2": _decoder("Olmo2"),
    "olmoe": _decoder("Olmoe", _EXPERTS, num_experts=4),
    "cohere": _decoder("Cohere"),
    "cohere2": _decoder("Cohere2", sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "granite": _decoder("Granite"),
    "granitemoe": _decoder("GraniteMoe", _EXPERTS, num_local_experts=4),
    "nemotron": _decoder("Nemotron"),
    "glm": _decoder("Glm"),
    "glm4": _decoder("Glm4"),
    "helium": _decoder("Helium"),
    "ernie4_5": _decoder("Ernie4_5"),
    "smollm3": _decoder("SmolLM3"),
    "exaone4": _decoder("Exaone4", sliding_window=5),
    "persimmon": _decoder("Persimmon", _WIDE),
    "diffllama": _decoder("DiffLlama"),
    "seed_oss": _decoder("SeedOss"),
    # decoders that compute with their mask: an indexer chooses keys or blocks of keys, or it is lengthened
    "deepseek_v32": _decoder("DeepseekV32", _INDEXED),
    "glm_moe_dsa": _decoder("GlmMoeDsa", _INDEXED),
    "deepseek_v4": _decoder("DeepseekV4", _INDEXED, num_key_value_heads=1, head_dim=16, sliding_window=5,
                            layer_types=["heavily_compressed_attention", "compressed_sparse_attention"]),
    "minimax_m3": Model("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", _EXPERTS | {"num_local_experts": 4,
                        "dense_intermediate_size": 48, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8,
                        "index_block_size": 3, "index_topk_blocks": 2,
                        "layer_types": ["full_attention", "minimax_m3_sparse"]}, "decoder", "sdpa"),
    "doge": _decoder("Doge", keep_window_size=4),
    # a sink for each query
    "inkling2": Model("Inkling2ForCausalLM", "Inkling2TextConfig", _EXPERTS | {"n_routed_experts": 4,
                      "sliding_window_size": 5, "layer_types": ["hybrid_sliding", "hybrid"]}, "decoder"),
    # encoders
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "distilbert": _encoder("DistilBert", {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2,
                           "n_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}),
    "electra": _encoder("Electra", embedding_size=16),
    "camembert": _encoder("Camembert"),
    "xlm_roberta": _encoder("XLMRoberta"),
    "albert": _encoder("Albert", embedding_size=16),
    "modernbert": _encoder("ModernBert", local_attention=6, global_attn_every_n_layers=2, cls_token_id=1,
                           sep_token_id=2),
    # encoder and decoder
    "t5": Model("T5ForConditionalGeneration", "T5Config", _T5, "pair"),
    "mt5": Model("MT5ForConditionalGeneration", "MT5Config", _T5, "pair"),
    "bart": Model("BartForConditionalGeneration", "BartConfig", _BART, "pair"),
    "mbart": Model("MBartForConditionalGeneration", "MBartConfig", _BART, "pair"),
    "pegasus": Model("PegasusForConditionalGeneration", "PegasusConfig", _BART, "pair"),
    "m2m_100": Model("M2M100ForConditionalGeneration", "M2M100Config", _BART, "pair"),
    "whisper": Model("WhisperForConditionalGeneration", "WhisperConfig", _BART | {"num_mel_bins": 8,
                     "max_source_positions": 12, "max_target_positions": 32, "suppress_tokens": None,
                     "begin_suppress_tokens": None}, "audio pair"),
    # images
    "vit": Model("ViTModel", "ViTConfig", _VISION, "vision"),
    "dinov2": Model("Dinov2Model", "Dinov2Config", _VISION, "vision"),
    "clip": Model("CLIPModel", "CLIPConfig", _TOWERS, "two towers"),
    "siglip": Model("SiglipModel", "SiglipConfig", _TOWERS, "two towers"),
}  # fmt: skip

# Families of which some layers have a state instead of keys and values.
_STATES = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_SHARED = _EXPERTS | _STATES | {"num_experts": 4, "shared_expert_intermediate_size": 24}
RECURRENT = {
    "qwen3_next": _decoder("Qwen3Next", _SHARED),
    "qwen3_5": Model("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _GROUPED | _STATES, "decoder"),
    "qwen3_5_moe": Model("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", _SHARED, "decoder"),
    "lara_mini": _decoder("LaraMini", _SHARED),
    "bailing_hybrid": _decoder("BailingHybrid", _LATENT | {
        "q_lora_rank": None, "head_dim": 8, "num_local_experts": 4, "layer_types": _STATES["layer_types"],
        "num_experts_per_token": 2,
    }),
    "kimi_linear": _decoder("KimiLinear", _WIDE | {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 6,
        "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "layer_types": _STATES["layer_types"], "mlp_layer_types": ["dense", "sparse"],
    }),
    "olmo_hybrid": _decoder("OlmoHybrid", _WIDE | _STATES | {"num_key_value_heads": 2, "linear_num_key_heads": 4}),
    "minimax": _decoder("MiniMax", _EXPERTS, num_local_experts=4, block_size=4),  # layer 0 counts the tokens
}  # fmt: skip

# For every run of the tests: each option of attention, and each kind of model.
SHORT = ("llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", "minimax_m3", "doge",
         "inkling2", "bert", "t5", "whisper")  # fmt: skip

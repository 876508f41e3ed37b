"""Which keys of config.json change nothing that is computed, so that all others can be refused.

A key is understood if what reads config.json asks for it. transformers ignores a key that its class
does not have, but a checkpoint that sets one may have been trained with it.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase

from penstock.engine.files.json_file import Fields, is_number, shown_json
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families.unsupported import EXPERTS

# Where a model comes from, how it was trained or is to be run; ids of tokens, which the tokenizer
# has; sampling, which generation_config.json has.
_HARMLESS = frozenset(
    {
        *("architectures", "model_type", "dtype", "torch_dtype", "auto_map", "quantization_config"),
        *("compression_config", "quantization", "pretraining_tp", "use_cache", "return_dict"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task"),
        *("task_specific_params", "tokenizer_class", "processor_class", "model_name", "model_id"),
        *("gradient_checkpointing", "torchscript", "use_bfloat16", "attn_implementation"),
        *("base_model", "base_model_name_or_path", "license", "language", "library_name", "tags"),
        *("max_length", "min_length", "max_new_tokens", "do_sample", "temperature", "top_p"),
        *("top_k", "typical_p", "num_beams", "num_beam_groups", "num_return_sequences"),
        *("repetition_penalty", "length_penalty", "diversity_penalty", "early_stopping"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "prefix"),
        *("remove_invalid_values", "cross_attention_hidden_size", "chunk_size_feed_forward"),
        *("tf_legacy_loss", "pruned_heads", "tie_encoder_decoder", "is_decoder", "keys_to_ignore"),
        *("is_llama_config", "is_mistral_derived", "use_flash_attention", "use_flash_attn"),
        *("flash_attention", "use_flash_attention_2", "use_fused_rope", "use_fused_rms_norm"),
        *("transformers.js_config", "transformers_js_config", "cache_implementation"),
        *("layer_norm_eps", "init_device", "init_std", "router_aux_loss_coef", "min_p"),
        *("z_loss_coefficient", "trust_remote_code", "device_map", "low_cpu_mem_usage"),
        *("max_batch_size", "model_parallel_size", "tensor_parallel_size", "penalty_alpha"),
        *("model_max_length", "max_sequence_length", "seq_length", "max_seq_len", "n_ctx"),
        *("unsloth_fixed", "unsloth_version", "neftune_noise_alpha", "num_nextn_predict_layers"),
        *("rope_theta", "rms_norm_eps", "hidden_act", "is_matryoshka"),
        *("matryoshka_dimensions", "summary_type", "classifier_dropout", "sentence_transformers"),
        *("max_window_layers", "sliding_window_pattern", "no_rope_layer_interval"),
        *("original_max_position_embeddings", "tokenizer_name", "vocab_file", "run_name"),
        # How others join two texts, and what they do with a classifier's logits.
        *("sbert_ce_default_activation_function", "use_pad_token", "use_sep_token"),
    }
)
_HARMLESS_PATTERNS = (
    *("_*", "*_version", "*_token", "*_token_id", "*_token_index", "*_token_ids", "*_dropout"),
    *("*_dropout_prob", "*_probs_dropout_prob"),
    *("*_pdrop", "initializer*", "output_*", "*_init_std", "*_loss_*coef", "unsloth_*"),
    *("training_*", "wandb*"),
)
# Models of text and images have encoders, and what leads from these to the text model.
_OF_ENCODERS = (
    *("text_config", "vision_config", "audio_config", "image_*", "video_*", "vision_*", "audio_*"),
    *("boi_*", "eoi_*", "mm_*", "multimodal_*", "projector_*", "spatial_merge_size"),
)

_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")
_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "scale_emb",
)
# Keys of other architectures (mixtures of experts, Gemma 2, Granite, Cohere, MiniCPM, Llama 4, ...)
# which change the answer, and the values, besides null, at which they do not. Any other key that is
# not understood is off at false, 0 and what is empty.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(EXPERTS, (0, 1)),
    **dict.fromkeys(_SOFTCAPS, (0,)),
    **dict.fromkeys(_MULTIPLIERS, (1,)),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "alibi": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
}


def check_keys(
    fields: Fields, understood: frozenset[str], head_dim: int, *, has_encoders: bool
) -> None:
    """Refuses a key that nothing has asked for and that may change the answer.

    understood: keys without an effect on this family. head_dim: of the text model. has_encoders:
    whether these are the settings of a model of text and images, outside of its text_config.
    """
    neutral = _NEUTRAL | {
        "attention_multiplier": (head_dim**-0.5,),
        "query_pre_attn_scalar": (head_dim,),
    }
    _check_neutral(fields, understood | fields.asked, neutral)
    patterns = _HARMLESS_PATTERNS + (_OF_ENCODERS if has_encoders else ())
    for name in fields.unread():
        if name in understood or name in _HARMLESS or name in neutral:
            continue
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        raise InvalidModel(
            f"{fields.path} has {shown_json(name)}: {shown_json(fields.get(name))}, which is not "
            "understood and may change what the model computes; delete the key if the model was "
            "trained without it",
            brief=f"{name[:40]} is not understood",
        )


def _check_neutral(
    fields: Fields, understood: frozenset[str], neutral: Mapping[str, tuple[float, ...]]
) -> None:
    for name, allowed in neutral.items():
        value = None if name in understood else fields.get(name)
        is_off = not value and not isinstance(value, int | float)
        if not is_off and not any(is_number(value, each) for each in allowed):
            raise InvalidModel(
                f"{fields.path} has {name}: {shown_json(value)}, which changes what the model "
                f"computes and is not supported; only "
                f"{' or '.join(map(json.dumps, (None, *allowed)))} is"
            )
    no_rope = None if "no_rope_layers" in understood else fields.get("no_rope_layers")
    # Each layer has 1 for rotary positions, 0 for none.
    if no_rope is not None and not (isinstance(no_rope, list) and all(n == 1 for n in no_rope)):
        raise InvalidModel(
            f"{fields.path} has no_rope_layers: {shown_json(no_rope)}, and layers without rotary "
            "positions are not supported"
        )

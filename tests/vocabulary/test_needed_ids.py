"""The ids in configs: every field of a config is known to hold some or none, and each form of ids is renumbered."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from collab_heads import supported_model_types
from collab_heads.vocabulary.needed_ids import FORMS, ids_of, renumber

IDS = {3: 1, 7: 2, 9: 3}  # old -> new; 4 and 5 are removed
# name of a field -> what it holds, what it becomes, and which tokens must stay because of it
HOLD = {
    "bos_token_id": (7, 2, {7}),
    "cls_token_id": (9, 3, {9}),
    "decoder_start_token_id": (3, 1, {3}),
    "eos_token_id": ([7, 9], [2, 3], {7, 9}),
    "forced_bos_token_id": (None, None, set()),
    "forced_eos_token_id": (60_000, 60_000, {60_000}),  # of no token
    "mask_token_id": (-1, -1, set()),
    "pad_token_id": (True, True, set()),
    "sep_token_id": ("7", "7", set()),
    "force_words_ids": ([[[7], [9, 3]], [7]], [[[2], [3, 1]], [2]], {3, 7, 9}),
    "bad_words_ids": ([[7], [7, 4], [9, 3]], [[2], [3, 1]], set()),
    "suppress_tokens": ((3, 4, 9), [1, 3], set()),
    "begin_suppress_tokens": ([4, 5], None, set()),
    "sequence_bias": ([[[7], -9.0], [[9, 4], 2.0]], [[[2], -9.0]], set()),
}
# fields that some models have, and no class declares
UNDECLARED = {
    "forced_decoder_ids": ([[1, None], [2, 7]], [[1, None], [2, 2]], {7}),
    "lang_to_id": ({"<|de|>": 9}, {"<|de|>": 3}, {9}),
    "lang_code_to_id": ({"de": 9}, {"de": 3}, {9}),
    "task_to_id": ({"translate": 3}, {"translate": 1}, {3}),
    "image_token_index": (9, 3, {9}),
    "stop_token_ids": ([9], [3], {9}),
    "stop_words_ids": ([[9, 3]], [[3, 1]], {3, 9}),
    "mask_index": (9, 3, {9}),
}
NESTED = ("task_specific_params",)
# These hold no ids of tokens: before a field is added here, look at what transformers does with it.
OTHERS = """
id2label label2id
_attn_implementation_internal _experts_implementation_internal _from_model_config _name_or_path _out_features
_out_indices _output_attentions _post_init_done _remove_final_layer_norm _sliding_window_pattern activation
activation_dropout activation_function adapter_attn_dim adapter_kernel_size adapter_stride add_adapter
add_cross_attention apply_layernorm apply_spec_augment architectures assistant_confidence_threshold assistant_early_exit
assistant_ensemble_weight assistant_lookbehind attention_bias attention_dropout attention_multiplier
attention_probs_dropout_prob attn_logit_softcapping attn_pdrop cache_config cache_implementation chunk_size_feed_forward
classifier_activation classifier_bias classifier_dropout classifier_dropout_prob classifier_pooling classifier_proj_size
codevector_dim compile_config constraints continuous_batching_config contrastive_logits_temperature conv_bias conv_dim
conv_kernel conv_pos_batch_norm conv_stride ctc_loss_reduction ctc_zero_infinity d_ff d_kv d_model
decoder_attention_heads decoder_bias decoder_ffn_dim decoder_layerdrop decoder_layers decoder_vocab_size dense_act_fn
deterministic_flash_attn dim disable_compile diversity_loss_weight diversity_penalty do_layer_norm_before do_sample
do_stable_layer_norm dola_layers drop_path_rate dropout dropout_rate dtype early_stopping emb_layer_norm_before
embd_pdrop embedding_dropout embedding_multiplier embedding_size enable_bias encoder_attention_heads encoder_ffn_dim
encoder_layerdrop encoder_layers encoder_no_repeat_ngram_size encoder_repetition_penalty encoder_stride epsilon_cutoff
esmfold_config eta_cutoff exponential_decay_length_penalty feat_extract_activation feat_extract_norm feat_proj_dropout
feat_proj_layer_norm feat_quantizer_dropout feed_forward_proj ffn_dim final_dropout final_logit_softcapping
guidance_scale head_dim hidden_act hidden_activation hidden_dim hidden_dropout hidden_dropout_prob hidden_size
image_size init_std initializer_cutoff_factor initializer_factor initializer_range inner_group_num intermediate_size
is_assistant is_decoder is_encoder_decoder is_folding_model is_gated_act layer_norm_elementwise_affine layer_norm_eps
layer_norm_epsilon layer_types layerdrop layerscale_value legacy length_penalty local_attention logit_scale_init_value
logits_scaling low_memory mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length
mask_time_min_masks mask_time_prob max_cache_len max_length max_matching_ngram_size max_new_tokens
max_position_embeddings max_relative_positions max_source_positions max_target_positions max_time max_window_layers
median_filter_width min_length min_new_tokens min_p mlp_bias mlp_dropout mlp_ratio n_embd n_head n_heads n_inner n_layer
n_layers n_positions no_repeat_ngram_size norm_bias norm_eps num_adapter_layers num_assistant_tokens
num_assistant_tokens_schedule num_attention_heads num_beam_groups num_beams num_channels num_codevector_groups
num_codevectors_per_group num_conv_pos_embedding_groups num_conv_pos_embeddings num_decoder_layers
num_feat_extract_layers num_heads num_hidden_groups num_hidden_layers num_key_value_heads num_layers num_mel_bins
num_negatives num_return_sequences output_attentions output_hidden_size output_hidden_states output_logits output_scores
patch_size penalty_alpha pooler_act pooler_dropout pooler_hidden_act pooler_hidden_size pooler_output_size pos_att_type
position_biased_input position_embedding_type prefill_chunk_size pretraining_tp problem_type proj_codevector_dim
projection_dim projection_size prompt_lookup_num_tokens qa_dropout qkv_bias query_pre_attn_scalar relative_attention
relative_attention_max_distance relative_attention_num_buckets remove_invalid_values renormalize_logits
reorder_and_upcast_attn repetition_penalty reshape_hidden_states resid_pdrop residual_multiplier return_dict
return_dict_in_generate rms_norm_eps rope_parameters rope_theta scale_attn_by_inverse_layer_idx scale_attn_weights
scale_decoder_outputs scale_embedding seq_classif_dropout share_encoder_decoder_embeddings sinusoidal_pos_embds
sliding_window sparse_pred_ignore_index sparse_prediction speculation_type stage_names stop_strings summary_activation
summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj target_lookbehind
tdnn_dilation tdnn_dim tdnn_kernel temperature tie_word_embeddings token_dropout token_healing top_h top_k top_p
transformers_version type_vocab_size typical_p use_bidirectional_attention use_cache use_mask_token use_mtp
use_sliding_window use_swiglu_ffn use_weighted_layer_sum vision_use_head vocab_list vocab_size watermarking_config
word_embed_proj_dim xvector_output_dim
"""


def fields() -> set[str]:
    """The fields of generation configs, and of the configs of all families and those in them."""
    found = set(vars(GenerationConfig()))

    def enter(config):
        for name, value in vars(config).items():
            enter(value) if isinstance(value, PretrainedConfig) else found.add(name)

    for model_type in supported_model_types():
        enter(AutoConfig.for_model(model_type))
    return found


def test_every_field_of_a_config_is_accounted_for():
    others = set(OTHERS.split())
    unknown = fields() - HOLD.keys() - others - {*NESTED}
    assert not unknown, f"do {sorted(unknown)} hold ids of tokens? Then FORMS must know them; else add them to OTHERS"
    assert not others & (HOLD.keys() | UNDECLARED.keys())
    for name in others:
        assert not any(pattern.search(name) for pattern, _, _ in FORMS), name


def expected_of(table, number):
    return {name: row[number] for name, row in table.items()}


@pytest.mark.parametrize("table", [HOLD, UNDECLARED], ids=["declared", "undeclared"])
@pytest.mark.parametrize("depth", range(3))
def test_ids_become_the_new_ones_at_any_depth(table, depth):
    held, new = expected_of(table, 0), expected_of(table, 1)
    for _ in range(depth):
        held, new = {"translation_en_to_ro": held}, {"translation_en_to_ro": new}
    config = SimpleNamespace(**held)
    assert ids_of(config) == set().union(*(row[2] for row in table.values()))
    renumber(config, IDS)
    assert vars(config) == new


def test_other_forms_of_weights_and_names_of_classes():
    labels = {"id2label": {7: "x_token_id"}, "label2id": {"x_token_id": 7}}
    config = SimpleNamespace(sequence_bias={(7,): -9.0, (9, 4): 2.0}, **labels)
    assert not ids_of(config)
    renumber(config, IDS)
    assert vars(config) == {"sequence_bias": {(2,): -9.0}, **labels}
    config.sequence_bias = {(4,): 1.0}
    renumber(config, IDS)
    assert config.sequence_bias is None  # an empty one stops `generate`
    config.bad_words_ids = [[4]]
    renumber(config, IDS)
    assert config.bad_words_ids is None

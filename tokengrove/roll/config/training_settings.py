"""Settings of ROLL's training, cluster and logs: they can be read, and have no effect here."""

from __future__ import annotations

from typing import Any

ROLES = (
    *("actor_train", "reference", "critic", "reward", "teacher", "student_train", "student_infer"),
    *("reward_normalization", "train_infer_correction", "router_args", "transfer_backend", "checkpoint_config"),
    "tracker_kwargs",
)
"""Sections; empty by default."""

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("reward_pretrain", "pipeline_cls", "render_save_dir", "model_name"),
            *("model_download_type", "reward_clip", "value_clip", "advantage_clip", "target_kl", "norm_mean_type"),
            *("norm_std_type", "user_defined_rollout_loop_cls", "val_prompt_length", "val_sequence_length"),
        )
    ),
    **dict.fromkeys(
        (
            *("is_num_return_sequences_expand", "is_use_additional_prompts", "profiler_timeline", "profiler_memory"),
            *("report_length_and_rewards", "is_offload_states", "is_offload_optimizer_states_in_train_step"),
            *("use_pg_clip_range", "use_reward_scaling", "add_len_reward", "use_reward_norm", "whiten_rewards"),
            *("whiten_advantages", "add_token_level_kl", "use_kl_loss", "dual_clip_loss", "enable_reference"),
            *("enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute", "use_opd", "dirty_data_mask"),
            *("parse_tool_call_parameter_to_dict", "open_feedback_turn", "use_token_reward", "offload_nccl"),
            "resume_from_checkpoint",
        ),
        False,
    ),
    "local_rank": -1,
    "num_gpus_per_node": 8,
    "track_with": "tensorboard",
    "pure_opd_pipeline_type": "rlvr",
    "max_running_requests": 128,
    "max_additional_running_prompts": 16,
    "rpc_timeout": 3600,
    "base_dir": "./output",
    "save_steps": 50,
    "logging_steps": 1,
    "logging_dir": "./output/logs",
    "output_dir": "./output",
    "max_ckpt_to_keep": 0,
    "length_profiler_dir": "./output/profiler",
    "profiler_output_dir": "./output/profiler",
    "otlp_output_dir": "./output/otlp",
    "model_update_buffer_size_mb": 1024,
    "num_nodes": 1,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "l2": 0.0,
    "lambd": 0.95,
    "gamma": 1,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "kl_penalty": "kl",
    "init_kl_coef": 0.2,
    "kl_horizon": 10000,
    "adv_estimator": "gae",
    "critic_warmup": 0,
    "kl_loss_coef": 0,
    "entropy_loss_coef": 0,
    "loss_agg_mode": "seq-mean-token-mean",
    "batch_adjust_mode": "copy",
    "episode_reward_weight": 1.0,
    "step_reward_weight": 1.0,
    "ratio_type": "token",
    "exp_mode": "train",
    "partial_gpu_mode": True,
}
"""Values, with ROLL's defaults."""

OF_WORKERS = (
    *("pg_variant", "model_args", "training_args", "data_args", "strategy_args", "world_size", "device_mapping"),
    *("num_gpus_per_worker", "model_update_frequency", "infer_batch_size", "backend_timeout", "topr_positive_weight"),
    *("topr_negative_weight", "max_concurrency", "use_dynamic_batching_in_train", "max_tokens_per_microbatch_in_train"),
    *("sequence_length_round_in_train", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer"),
    *("sequence_length_round_in_infer", "offload_nccl", "use_sequence_packing", "sequence_packing_args"),
    *("logits_in_fp32", "router_replay", "apply_loss_scale", "mtp_training_mode", "opd_kl_coef", "tag_included"),
)
"""Settings of a worker in ROLL, which an environment manager may therefore also have."""

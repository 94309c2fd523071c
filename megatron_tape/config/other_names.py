"""Settings of other training stacks and their counterparts here. Errors about unknown keys suggest
the counterpart.

The stacks are Hugging Face's Trainer and models, Megatron-LM, nanoGPT, torchtitan, LitGPT,
Lightning and DeepSpeed.
"""

_NAMES = {
    "model.num_layers": "n_layer n_layers num_hidden_layers layers depth",
    "model.hidden_size": "n_embd d_model dim model_dim hidden_dim embed_dim embedding_dim",
    "model.ffn_hidden_size": "intermediate_size ffn_dim ffn_size ffn_hidden_dim mlp_dim d_ff",
    "model.num_attention_heads": "num_heads n_head n_heads heads nhead",
    "model.num_query_groups": (
        "num_key_value_heads num_kv_heads n_kv_head n_kv_heads n_query_groups"
    ),
    "model.kv_channels": "head_dim head_size d_head",
    "model.seq_length": (
        "sequence_length seq_len max_seq_len max_seq_length max_sequence_length block_size "
        "context_length context_size n_ctx n_positions max_position_embeddings"
    ),
    "model.vocab_size": "padded_vocab_size n_vocab",
    "model.norm_epsilon": "norm_eps rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.tie_embeddings": "tie_word_embeddings weight_tying untie_embeddings_and_output_weights",
    "model.init_std": "initializer_range init_method_std",
    "model.qkv_bias": "attention_bias add_qkv_bias add_bias_linear",
    "model.qk_norm": "qk_layernorm",
    "model.attention_backend": (
        "attn_implementation attention_implementation attn_backend use_flash_attn flash_attention"
    ),
    "model.position_encoding": (
        "position_embedding_type position_embedding positional_encoding pos_encoding"
    ),
    "model.position.rope_theta": "rope_theta rope_base rotary_base",
    "data.prefix": (
        "data_path data_dir train_data train_data_path train_file dataset dataset_name dataset_path"
    ),
    "data.tokenizer": (
        "tokenizer tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path"
    ),
    "data.num_workers": "dataloader_num_workers",
    "optimizer.kind": "optim optimizer_name optimizer_type",
    "optimizer.lr": "learning_rate lr max_lr peak_lr base_lr",
    "optimizer.min_lr": "min_learning_rate final_lr lr_min",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.beta1": "adam_beta1 beta_1",
    "optimizer.beta2": "adam_beta2 beta_2",
    "optimizer.beta1 or optimizer.beta2": "betas adam_betas",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.clip_grad": (
        "max_grad_norm max_norm grad_clip gradient_clipping gradient_clip_val clip_grad_norm"
    ),
    "optimizer.z_loss": "z_loss_weight",
    "schedule.kind": (
        "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style decay_type scheduler"
    ),
    "schedule.warmup_steps": (
        "warmup warmup_steps warmup_iters warmup_ratio num_warmup_steps lr_warmup_steps "
        "lr_warmup_iters lr_warmup_fraction"
    ),
    "schedule.decay_steps": "lr_wsd_decay_iters decay_ratio",
    "parallel.tensor_model_parallel_size": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree"
    ),
    "parallel.context_parallel_size": "cp cp_size context_parallel context_parallel_degree",
    "parallel.pipeline_model_parallel_size": (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree"
    ),
    "parallel.virtual_pipeline_size": (
        "vpp virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage"
    ),
    "deepspeed.zero_stage": "zero zero_optimization fsdp",
    "train.steps": (
        "steps max_steps train_steps training_steps total_steps num_steps num_train_steps"
        " max_train_steps train_iters max_iters iterations"
    ),
    "train.global_batch_size": "train_batch_size total_batch_size gbs",
    "train.micro_batch_size": (
        "per_device_train_batch_size per_device_batch_size device_batch_size local_batch_size "
        "train_micro_batch_size_per_gpu mbs"
    ),
    "train.global_batch_size or train.micro_batch_size": "batch_size",
    "train.batch_ramp": "rampup_batch_size",
    "train.precision": "bf16 dtype torch_dtype params_dtype mixed_precision mixed_precision_param",
    "train.seed": "seed random_seed",
    "train.deterministic": "deterministic_mode",
    "train.recompute": (
        "gradient_checkpointing activation_checkpoint activation_checkpointing"
        " checkpoint_activations recompute_granularity"
    ),
    "train.eval_interval": "eval_freq eval_every val_check_interval",
    "train.eval_interval or train.eval_steps": "eval_steps",
    "train.eval_steps": "eval_iters limit_val_batches",
    "train.average": "ema use_ema",
    "train.average.decay": "ema_decay",
    "train.profile": "profiler profiling",
    "checkpoint.directory": "save save_dir checkpoint_dir checkpoint_folder ckpt_dir",
    "checkpoint.interval": (
        "save_steps save_interval save_every checkpoint_interval checkpoint_every ckpt_interval"
    ),
    "checkpoint.keep": "save_total_limit keep_latest_k keep_last",
    "checkpoint.resume": "resume load load_checkpoint resume_from resume_from_checkpoint init_from",
    "checkpoint.asynchronous": "async_save async_mode",
    "extension.from": (
        "base_model model_name_or_path pretrained_model pretrained_model_name_or_path"
    ),
    "extension.lora_rank": "lora_r",
    "extension.lora_targets": "target_modules lora_target_modules",
    "logging.directory": (
        "output_dir out_dir run_dir log_dir logging_dir tensorboard_dir dump_folder"
    ),
    "logging.interval": "logging_steps log_interval log_freq log_every log_every_n_steps",
    "logging.tensorboard": "tensorboard enable_tensorboard",
    "logging.wandb": "wandb use_wandb enable_wandb wandb_log report_to",
    "logging.wandb.project": "wandb_project",
    "logging.wandb.entity": "wandb_entity",
    "logging.wandb.name": "run_name wandb_name wandb_run_name wandb_exp_name",
}
OTHER_NAMES = {name: key.split(" or ") for key, names in _NAMES.items() for name in names.split()}
"""Keys of this project by the name of the setting in other stacks. An ambiguous name has several
keys.
"""

_ACCUMULATION = (
    "set train.global_batch_size and train.micro_batch_size: the number of accumulated"
    " micro-batches is global_batch_size / (micro_batch_size x data-parallel GPUs)"
)
_EPOCHS = "set train.steps: the length of a run is a number of steps, not of epochs"
_DATA_PARALLEL = (
    "remove it: the data-parallel size is the number of GPUs divided by the sizes in the section"
    " parallel"
)
WITHOUT_COUNTERPART = {
    **dict.fromkeys(
        (
            "gradient_accumulation_steps",
            "gradient_accumulation",
            "grad_accum_steps",
            "accumulate_grad_batches",
        ),
        _ACCUMULATION,
    ),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs", "epochs"), _EPOCHS),
    **dict.fromkeys(
        ("dp", "dp_size", "data_parallel_size", "data_parallel_shard_degree"), _DATA_PARALLEL
    ),
    "fp16": "set train.precision to bf16 or fp32: fp16 is not supported",
}
"""What to do instead, by the name of a setting of another stack that has no counterpart here."""

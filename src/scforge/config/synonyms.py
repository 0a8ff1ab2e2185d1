"""What other tools call an option: used to suggest ours, and never accepted in its place."""

from __future__ import annotations

__all__ = ["SYNONYMS"]

_OTHERS = {
    "data.batch_key": "batch batch_col batch_column",
    "data.gene_key": "gene_col gene_column gene_name_col gene_names",
    "data.gene_vocab": "genes vocab vocab_file vocab_path vocabulary",
    "data.labels_key": "cell_type_key celltype_key label label_key labels",
    "data.max_genes": "max_length n_genes seq_len seq_length sequence_length",
    "data.num_threads": "dataloader_num_workers n_threads n_workers num_proc num_workers threads workers",
    "data.paths": "adata data_path file files h5ad input path",
    "data.preprocessing.hvg_selection": "hvg n_hvg n_hvgs n_top_genes num_hvg",
    "data.split.by": "split_by split_key",
    "eval.every_n_epochs": "eval_every every_n_epoch",
    "model.architecture": "arch architecture_name model_name model_type",
    "model.dropout": "attention_probs_dropout_prob dropout_prob dropout_rate hidden_dropout_prob",
    "model.ffn_dim": "d_ff d_hid dim_feedforward feedforward_dim intermediate_size mlp_dim",
    "model.hidden_dim": "d_model dim embed_dim embedding_dim embsize hidden hidden_size n_embd width",
    "model.max_seq_len": "max_position_embeddings",
    "model.num_heads": "heads n_head n_heads nhead nheads num_attention_heads",
    "model.num_layers": "depth layers n_layer n_layers nlayers num_hidden_layers",
    "objective.name": "loss pretraining_objective pretraining_task task",
    "output.checkpoint_dir": "checkpoint_path checkpoints ckpt_dir default_root_dir output_dir save_dir save_path",
    "output.log_dir": "logdir logging_dir",
    "output.loggers": "log_with logger report_to",
    "output.project": "project_name wandb_project",
    "output.run_name": "experiment_name wandb_name",
    "output.save_top_k": "n_checkpoints save_total_limit",
    "seed": "random_seed random_state rng_seed",
    "tokenizer.masking.mask_ratio": "mask_prob mask_probability mlm_prob mlm_probability",
    "tokenizer.strategy": "tokenizer_name tokenizer_type",
    "training.accelerator": "accelerators device",
    "training.accumulate_grad_batches": "accumulate accumulation_steps grad_accum_steps gradient_accumulation_steps",
    "training.batch_size": "batchsize bs per_device_train_batch_size train_batch_size",
    "training.checkpoint_every_n_steps": "checkpoint_every save_every save_every_n_steps save_interval save_steps",
    "training.compile": "torch_compile",
    "training.devices": "gpu gpus n_devices n_gpu n_gpus ngpus num_devices num_gpus",
    "training.early_stopping_patience": "early_stop_patience patience",
    "training.ema_decay": "ema",
    "training.gradient_checkpointing": "activation_checkpointing",
    "training.gradient_clip_val": "clip clip_grad clip_grad_norm grad_clip gradient_clip max_grad_norm",
    "training.log_every_n_steps": "log_every log_interval logging_steps",
    "training.max_epochs": "epoch epochs n_epoch n_epochs num_epochs num_train_epochs",
    "training.max_steps": "iterations max_iter max_iters n_steps num_steps num_train_steps steps total_steps",
    "training.num_nodes": "n_nodes nnodes nodes",
    "training.optimizer.lr": "base_lr learning_rate max_lr peak_lr",
    "training.optimizer.weight_decay": "decay l2 wd",
    "training.precision": "amp amp_dtype bf16 dtype fp16 mixed_precision",
    "training.scheduler.name": "lr_schedule lr_scheduler lr_scheduler_type schedule",
    "training.scheduler.warmup_steps": "n_warmup_steps num_warmup_steps warmup",
    "training.strategy": "distributed_strategy distribution_strategy parallel",
    "training.validation_size": "test_size val_fraction val_size val_split valid_size validation_split",
}

SYNONYMS = {synonym: option for option, synonyms in _OTHERS.items() for synonym in synonyms.split()}
"""Name that other tools use to the dotted name of the option here."""

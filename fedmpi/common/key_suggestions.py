"""Suggest the key that a user of other programs meant by an unknown one."""

from collections.abc import Iterable

from fedmpi.common.text import nearest

_OURS = {
    "train.lr": "lr learning_rate client_lr local_lr eta eta_l step_size",
    "train.epochs": "epochs epoch local_epochs num_epochs n_epochs local_ep inner_epochs",
    "train.batch_size": "batch_size batchsize batch bs local_batch_size local_bs train_batch_size",
    "train.steps": "local_steps num_steps local_updates num_updates local_iterations iterations max_steps",
    "train.optim": "optim optimizer optimiser local_optimizer client_optimizer client_optim",
    "train.momentum": "momentum",
    "train.weight_decay": "weight_decay wd l2",
    "train.clip_norm": "clip clip_grad grad_clip max_grad_norm gradient_clip clip_grad_norm",
    "train.schedule": "schedule scheduler lr_scheduler lr_schedule",
    "train.decay": "lr_decay decay_rate",
    "rounds": "rounds num_rounds n_rounds communication_rounds comm_rounds comm_round global_rounds global_epochs",
    "seed": "seed random_seed manual_seed rng_seed",
    "name": "run_name exp_name experiment experiment_name",
    "output": "output_dir out outdir save_dir log_dir logdir results results_dir",
    "data.source": "dataset data_set dataset_name",
    "data.root": "data_dir data_path data_root dataroot datadir",
    "data.validation": "val val_fraction validation_fraction val_size",
    "data.picture_column": "image_column image_col image_path path_column file_column filename_column",
    "data.label_column": "target_column target_col class_column label_col y_column",
    "data.site_column": "client_column hospital_column center_column centre_column",
    "data.group_column": "patient_column subject_column",
    "data.partition.scheme": "partition partitioner split splitter iid non_iid",
    "data.partition.clients": "clients num_clients n_clients num_users n_users users parties n_parties client_count",
    "data.partition.alpha": "alpha dirichlet_alpha concentration",
    "data.partition.s": "shards_per_client shards classes_per_client",
    "model.name": "arch architecture network net backbone",
    "method.name": "algorithm strategy fl_method aggregator algo",
    "task.name": "loss criterion objective",
    "cohort.fraction": "fraction frac participation participation_rate client_fraction sample_rate join_ratio "
    "fraction_fit",
    "cohort.size": "clients_per_round num_clients_per_round users_per_round cohort_size train_cohort_size",
    "server.lr": "server_lr global_lr eta_g server_learning_rate",
    "server.optim": "server_optimizer server_optim global_optimizer",
    "server.rule": "rule aggregation aggregation_rule defense",
    "evaluate.every": "eval_every eval_interval test_every evaluate_every eval_freq",
    "evaluate.protocol": "protocol metrics metric",
    "compute.device": "device gpu gpus cuda use_cuda num_gpus n_gpus accelerator gpu_id",
    "compute.precision": "precision amp fp16 bf16 mixed_precision",
    "compute.threads": "threads num_threads n_threads cores cpus num_workers workers",
    "compute.tf32": "allow_tf32 matmul_precision float32_matmul_precision",
    "compute.cudnn_benchmark": "benchmark cudnn cudnn_autotune",
    "compute.deterministic": "deterministic",
    "comm.backend": "backend dist_backend",
}
_OF_A_SWEEP = {  # meant so at the outermost level alone: data.axes is a key of its own
    "over": "sweep sweeps axes axis grid grid_search param_grid search_space search_grid multirun matrix vary overs",
    "leave_out": "skip exclude except leaveout leave_outs",
    "best": "tune tuning",
    "comm.round_timeout_s": "timeout round_timeout",
}
_MEANT = {word: ours for ours, words in _OURS.items() for word in words.split()}
_OUTERMOST = {word: ours for ours, words in _OF_A_SWEEP.items() for word in words.split()}


def suggest_key(key: str, where: str, known: Iterable[str], homes: Iterable[str] = ()) -> str:
    """Return the advice on an unknown key: `did you mean 'epochs'? allowed: batch_size, epochs, lr`.

    Args:
        key: the unknown word.
        where: the section it stands in, "train"; "" for the outermost.
        known: the keys that the section has.
        homes: the dotted keys of other sections that end in this word.
    """
    known, homes = sorted(known), list(homes)
    allowed = f"allowed: {', '.join(known)}"
    word = key.casefold().replace("-", "_")
    meant = _MEANT.get(word, "") or ("" if where else _OUTERMOST.get(word, ""))
    section, _, last = meant.rpartition(".")
    if meant and last in known and (section == where or last == "optim"):
        return f"did you mean '{last}'? {allowed}"
    if homes:
        homes = list(dict.fromkeys([meant, *homes] if meant else homes))
        return f"did you mean {' or '.join(homes)}? {allowed}"
    if "." in key:
        first, *rest = key.split(".")
        return f"in a file a key stands in its section: {first}: {{{': {'.join(rest)}: ...{'}' * len(rest)}; {allowed}"
    if meant and meant != f"{where}.{key}" and section != where:
        return f"did you mean {meant}? {allowed}"
    return nearest(key, known)

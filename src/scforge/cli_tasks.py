"""The commands around fine-tuning: ``scforge finetune``, ``predict`` and ``evaluate``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scforge.errors import MissingFileError, OptionError, listing

__all__ = ["INTERRUPTED", "add_evaluate", "add_finetune", "add_predict", "check_places"]

_OF_TASKS = ("trained_on", "base_model")
_OF_EMBEDDINGS = (
    "obsm_keys",
    "labels_key",
    "batch_key",
    "groups_key",
    "seeds",
    "intervals",
    "untrained",
    "network",
    "gene_key",
)
_FLAGS = {
    "--base-model": "finetune.base_model",
    "--data": "data.paths",
    "--task": "finetune.task",
    "--labels-key": "finetune.labels_key",
    "--batch-key": "finetune.batch_key",
    "--perturbation-key": "finetune.perturbation_key",
    "--control": "finetune.control",
    "--validation-size": "finetune.validation_size",
    "--test-size": "finetune.test_size",
    "--split-by": "finetune.split_by",
    "--split-key": "finetune.split_key",
    "--freeze": "finetune.freeze",
    "--lora": "finetune.lora",
    "--eval": "finetune.evaluate",
    "--max-epochs": "training.max_epochs",
    "--seed": "seed",
    "--output": "output.checkpoint_dir",
}
"""Flags of ``scforge finetune`` to options of a YAML file."""


def check_places(source: str, output: str | None = None, endings: Sequence[str] = (), *, place: str = "") -> None:
    """Raise for a file that is not there, or an output of another kind, before seconds are spent on imports."""
    path = Path(source)
    is_name = "://" in source or any(sign in source for sign in "*?[")
    if path.suffix == ".h5ad" and not is_name and not path.exists():
        from scforge.data.h5ad import similar_file

        raise MissingFileError(f"{place}the file {source!r} does not exist{similar_file(path)}")
    if output is not None and Path(output).suffix not in endings:
        kinds = listing(ending for ending in endings if ending)
        raise OptionError(f"output={output!r} (-o) does not end in one of {kinds}; give such a name.")


class _MayStandAlone(argparse.Action):
    """A flag with or without a value: KEY=VALUE behind it is no value of it, but an override as elsewhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, nargs="?", const=True)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        if _is_override(values):
            namespace.overrides = [*namespace.overrides, values]
            values = self.const
        setattr(namespace, self.dest, values)


def _is_override(value: Any) -> bool:
    key, equals, _ = str(value).partition("=")
    return bool(equals) and all(name.isidentifier() for name in key.split("."))


def _layers(text: str) -> bool | int | str:
    if _is_override(text):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers; give one, or nothing for the head alone")
    return int(text)


INTERRUPTED = 130
"""Exit code after Ctrl-C, also where a training then kept what it had, so that a script does not continue."""


def _finetune(arguments: argparse.Namespace) -> int:
    from scforge.estimators.config_start import first_process_speaks
    from scforge.estimators.finetuning_from_config import finetune_from_config, finetuning_config, finetuning_report

    config = finetuning_config(arguments.config, arguments.overrides, flags=_given(arguments))
    options = {"resume": arguments.resume, "overwrite": arguments.overwrite}
    speaks = first_process_speaks()
    result = finetune_from_config(config, progress_bar=not arguments.quiet, **options)
    if speaks:
        print("\n".join(finetuning_report(result, config)))
    return INTERRUPTED if result.model._stopped else 0


def _given(arguments: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """Return the flags that were set, each with its option and its value."""
    values = {flag: getattr(arguments, flag.lstrip("-").replace("-", "_")) for flag in _FLAGS}
    return {flag: (_FLAGS[flag], value) for flag, value in values.items() if value is not None}


def _predict(arguments: argparse.Namespace) -> None:
    check_places(arguments.source, arguments.output, [".csv", ".h5ad"])
    from scforge.estimators.predicting import predict_to

    options = {name: getattr(arguments, name) for name in ("threshold", "majority_voting", "soft", "key_added")}
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    options |= _options(arguments.overrides, options)
    options |= {name: getattr(arguments, name) for name in ("batch_size", "device", "overwrite")}
    done = predict_to(arguments.model, arguments.source, arguments.output, **options)
    if not arguments.quiet:
        print(f"Predicted {done}: {arguments.output}")


def _options(overrides: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """Read ``threshold=0.5`` and the like, the values as YAML."""
    from scforge.config._yaml import parse_yaml

    options: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.isidentifier() or name in {*given, "batch_size", "device", "overwrite"}:
            raise OptionError(f"{override!r} is no option of the task's predict; write it as name=value, once.")
        options[name] = parse_yaml(text, where=override)[0]
    return options


def _evaluate(arguments: argparse.Namespace) -> None:
    if (arguments.source is None) == (arguments.data is None):
        raise OptionError("name the cells once: as FILE, or with --data FILE.")
    names = (*("benchmarks", "batch_size", "device", "seed", "overwrite"), *_OF_TASKS, *_OF_EMBEDDINGS)
    options = {name: getattr(arguments, name) for name in names}
    against = [int(name) if name.isdigit() else name for name in arguments.against or ()]
    if against and not arguments.baselines:
        raise OptionError("--against names baselines and --no-baselines asks for none; give one of them.")
    source = arguments.data if arguments.source is None else arguments.source
    check_places(source, None, [])
    from scforge.estimators.evaluating_files import evaluate_to
    from scforge.eval.report import Report

    options |= {"baselines": against or arguments.baselines, "progress_bar": not arguments.quiet}
    found = evaluate_to(arguments.model, source, arguments.output, **options)
    print(found if isinstance(found, Report) else found.round(4).to_string())
    if arguments.output is not None:
        print(f"Written: {arguments.output}")


def _add_overrides(command: argparse.ArgumentParser, words: str) -> None:
    # Extended, not set: flags add to them, too.
    command.add_argument("overrides", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help=words)


def add_finetune(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``scforge finetune``."""
    command.add_argument("--config", metavar="FILE", help="YAML or TOML file with a section finetune; flags count more")
    command.add_argument(
        "--base-model", metavar="MODEL", help="the model to fine-tune: folder, org/name or scforge://name"
    )
    command.add_argument("--data", metavar="FILE", help="h5ad file, or a store")
    command.add_argument("--task", metavar="NAME", help="annotation, integration, perturbation, regression, ...")
    command.add_argument("--labels-key", metavar="COLUMN", help="column of obs with the labels")
    command.add_argument("--batch-key", metavar="COLUMN", help="column of obs with the batches")
    command.add_argument("--perturbation-key", metavar="COLUMN", help="column of obs with the perturbations")
    command.add_argument("--control", metavar="LABEL", help="how cells without perturbation are called there")
    command.add_argument("--validation-size", type=float, metavar="SHARE", help="share of the cells (0.1)")
    command.add_argument("--test-size", type=float, metavar="SHARE", help="share of the cells, for --eval (0.1)")
    command.add_argument("--split-by", metavar="COLUMN", help="hold out whole groups, e.g. donors")
    command.add_argument("--split-key", metavar="COLUMN", help="column of obs that says train, validation or test")
    command.add_argument(
        "--freeze", action=_MayStandAlone, type=_layers, metavar="N", help="train the head alone, or leave N layers"
    )
    command.add_argument("--lora", action="store_true", default=None, help="train low-rank adapters, not the weights")
    command.add_argument("--max-epochs", type=int, metavar="N", help="most epochs (default: by task and cells)")
    command.add_argument("--seed", type=int, metavar="N", help="seed of split, head and order (0)")
    command.add_argument(
        "--eval", action=_MayStandAlone, metavar="NAME", help="score the cells of --test-size, beside baselines"
    )
    command.add_argument("-o", "--output", metavar="DIR", help="folder of the training (default: DATA_TASK)")
    command.add_argument(
        "--resume", metavar="auto|STATE", help="go on: with the latest state, if any, or with this one"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the training in --output")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    _add_overrides(command, "e.g. training.lr=1e-4 finetune.lora.r=16")
    command.set_defaults(run=_finetune)


def add_predict(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``scforge predict``."""
    command.add_argument("source", metavar="FILE", help="h5ad file, store, pattern or URL")
    command.add_argument(
        "-m", "--model", required=True, metavar="MODEL", help="fine-tuned: folder, org/name or scforge://name"
    )
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="out.h5ad (the cells) or out.csv")
    command.add_argument("--threshold", type=float, metavar="SHARE", help='less certain cells become "unassigned"')
    command.add_argument(
        "--majority-voting", action=_MayStandAlone, metavar="COLUMN", help="also a vote in each cluster (of COLUMN)"
    )
    command.add_argument("--soft", action="store_true", help="probabilities of all classes")
    command.add_argument("--key-added", metavar="NAME", help="column of obs to write")
    command.add_argument("--batch-size", type=int, default=256, metavar="N", help="cells at once (%(default)s)")
    command.add_argument("--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if any)")
    command.add_argument("--overwrite", action="store_true", help="replace the output")
    command.add_argument("--quiet", action="store_true", help="no summary at the end")
    _add_overrides(command, "further options of the task's predict")
    command.set_defaults(run=_predict)


def add_evaluate(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``scforge evaluate``."""
    command.add_argument("source", nargs="?", metavar="FILE", help="cells: an h5ad file, or a data set, e.g. pbmc3k")
    command.add_argument("--data", metavar="FILE", help="the same")
    command.add_argument(
        *("-m", "--model"),
        required=True,
        action="append",
        metavar="MODEL",
        help="folder, org/name or scforge://name; again for another row",
    )
    command.add_argument("-o", "--output", metavar="PLACE", help="write the figures (out.csv) or a report (a folder)")
    command.add_argument(
        "--benchmarks",
        nargs="+",
        metavar="NAME",
        help="score the embedding by these (default: a fine-tuned model by its task, others by cell_type_probe, scib "
        "and geometry)",
    )
    command.add_argument(
        "--against",
        nargs="+",
        metavar="NAME",
        help="baselines of embeddings, e.g. pca harmony (default: all; scvi takes minutes)",
    )
    command.add_argument("--obsm-keys", nargs="+", default=(), metavar="KEY", help="embeddings in FILE, each a row")
    command.add_argument("--labels-key", metavar="COLUMN", help="column of obs with the cell types")
    command.add_argument("--batch-key", metavar="COLUMN", help="column of obs with the batches")
    command.add_argument("--groups-key", metavar="COLUMN", help="column of obs with donors, which folds hold out whole")
    command.add_argument("--network", metavar="FILE", help="true edges, for the benchmark gene_network")
    command.add_argument("--gene-key", metavar="COLUMN", help="column of var with the gene names of --network")
    command.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of folds (%(default)s)")
    command.add_argument(
        "--intervals", action=argparse.BooleanOptionalAction, default=True, help="intervals and tests of embeddings"
    )
    command.add_argument(
        "--untrained", action=argparse.BooleanOptionalAction, default=True, help="a row of random weights"
    )
    command.add_argument(
        "--baselines", action=argparse.BooleanOptionalAction, default=True, help="beside the model, where possible"
    )
    command.add_argument("--trained-on", metavar="FILE", help="cells of the fine-tuning, if FILE has others")
    command.add_argument("--base-model", metavar="MODEL", help="model before fine-tuning, for its frozen embedding")
    command.add_argument("--batch-size", type=int, default=256, metavar="N", help="cells at once (%(default)s)")
    command.add_argument("--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if any)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of baselines (%(default)s)")
    command.add_argument("--overwrite", action="store_true", help="replace the output")
    command.add_argument("--quiet", action="store_true", help="no lines on how far it is")
    command.set_defaults(run=_evaluate)

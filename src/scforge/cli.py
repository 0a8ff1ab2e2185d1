"""The command line: one parser, and one function a command."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from scforge.errors import ConfigError, MissingFileError, OptionError, ScforgeError, ScforgeWarning, listing

_OPTIONS = (
    *("version", "tokens_medians", "ensembl_map", "gene_names", "pooling", "embedding_layer"),
    *("vocab", "args", "cls_value", "normalize", "part"),
)
"""Flags that are options of a family, under their names in Python."""


def add_convert_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``scforge convert-checkpoint``."""
    command.add_argument("source", metavar="SOURCE", help="folder or file of the checkpoint")
    command.add_argument("-o", "--output", required=True, metavar="DIR", help="folder of the model to make")
    command.add_argument("--family", metavar="NAME", help="geneformer, scgpt, ... (default: what recognizes it)")
    command.add_argument("--version", metavar="NAME", help="Geneformer: V1 or V2 (default: by its positions)")
    command.add_argument(
        "--tokens-medians", metavar="PLACE", help="Geneformer: folder or table of its dictionaries (default: SOURCE)"
    )
    command.add_argument("--ensembl-map", metavar="FILE", help="Geneformer: former Ensembl ids to current ones")
    command.add_argument("--gene-names", metavar="FILE", help="Geneformer: symbols to Ensembl ids")
    command.add_argument(
        "--pooling",
        metavar="NAME",
        help="Geneformer: genes (default of V1), cls (of V2) or mean; scFoundation: depths (default) or mean",
    )
    command.add_argument(
        "--embedding-layer", type=int, metavar="N", help="Geneformer: embed from N layers below the last (1)"
    )
    command.add_argument("--vocab", metavar="FILE", help="scGPT: its vocab.json; scFoundation: its panel of genes")
    command.add_argument("--args", metavar="FILE", help="scGPT: its args.json")
    command.add_argument("--cls-value", type=float, metavar="VALUE", help="scGPT: value of CLS (default: pad_value)")
    command.add_argument(
        "--normalize", action="store_true", default=None, help="scGPT: embeddings of length 1, as its embed_data"
    )
    command.add_argument("--part", metavar="NAME", help="scFoundation: cell, gene or rde")
    command.add_argument("--overwrite", action="store_true", help="replace the model in --output; other files stay")
    command.set_defaults(run=_convert_checkpoint)


def _convert_checkpoint(arguments: argparse.Namespace) -> None:
    from scforge._io import check_writable
    from scforge.estimators import Encoder

    check_writable("output", arguments.output)
    given = {name: getattr(arguments, name) for name in _OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    model = Encoder.from_checkpoint(arguments.source, family=arguments.family, **options)
    model.save(arguments.output, overwrite=arguments.overwrite)
    print(f"Wrote {arguments.output}: {model.spec.architecture}, {model.vocab}")


_OF_CARD = ("license", "data", "citation", "metrics")
_OF_REPO = ("private", "revision", "commit_message", "create_pr")


def _push(arguments: argparse.Namespace) -> None:
    from scforge.workflows.models import push_folder

    names = (*_OF_REPO, *_OF_CARD, "base")
    print(push_folder(arguments.folder, arguments.repo_id, **{name: getattr(arguments, name) for name in names}))


def _pull(arguments: argparse.Namespace) -> None:
    from scforge.workflows.models import pull_folder

    names = ("revision", "cache_dir", "local_files_only", "overwrite")
    print(pull_folder(arguments.name, arguments.output, **{name: getattr(arguments, name) for name in names}))


def add_push(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``scforge push``."""
    command.add_argument("folder", metavar="DIR", help="folder of a model, or of adapters")
    command.add_argument("repo_id", metavar="REPO", help="org/name; made if there is none")
    command.add_argument(
        "--private", action=argparse.BooleanOptionalAction, help="of a new repository (default: as the hub is set)"
    )
    command.add_argument("--revision", metavar="BRANCH", help="branch to write to (default: the main one)")
    command.add_argument("--message", dest="commit_message", metavar="TEXT", help="first line of the commit")
    command.add_argument("--pr", dest="create_pr", action="store_true", help="open a pull request, and write nothing")
    command.add_argument("--license", metavar="NAME", help="for the card, e.g. apache-2.0")
    command.add_argument("--data", nargs="+", metavar="NAME", help="for the card: what the model was trained on")
    command.add_argument("--citation", metavar="TEXT", help="for the card: how to cite the model")
    command.add_argument("--metrics", metavar="FILE", help="for the card: out.csv of scforge evaluate, with baselines")
    command.add_argument("--base", metavar="NAME", help="of adapters: org/name of the model that they sit on")
    command.set_defaults(run=_push, prints_result=True)


def add_pull(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``scforge pull``."""
    command.add_argument("name", metavar="NAME", help="org/name, hf://org/name@revision, or scforge://name@version")
    command.add_argument("-o", "--output", metavar="DIR", help="folder to write (default: it stays in the cache)")
    command.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: the main branch)")
    command.add_argument("--cache-dir", metavar="DIR", help="another cache than that of the hub")
    command.add_argument("--offline", dest="local_files_only", action="store_true", help="look in the cache only")
    command.add_argument("--overwrite", action="store_true", help="replace the model in --output; other files stay")
    command.set_defaults(run=_pull, prints_result=True)


_OF_READING = ("kind", "field", "gene_column", "text_column")
_OF_TRAINING = (
    *("validation", "validation_size", "embedding_dim", "pwff_hidden_dim", "num_layers", "num_heads", "dropout_rate"),
    *("seq_len", "sig_reg", "max_epochs", "max_steps", "batch_size", "optimizer", "lr", "gradient_checkpointing"),
    *("device", "precision", "checkpoint_every_n_steps", "resume", "overwrite", "seed"),
)
_OF_EMBEDDING = ("duplicates", "batch_size", "device", "overwrite")


def add_soma(soma: argparse.ArgumentParser) -> None:
    """Add ``train`` and ``embed``."""
    commands = soma.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands.add_parser("train", help="train a model on the bytes of files"))
    _add_embed(commands.add_parser("embed", help="embed files, records or descriptions; a table of gene vectors"))


def _given_to_soma(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the flags that were set; defaults stand in Python."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _train_soma(arguments: argparse.Namespace) -> None:
    from scforge.soma import train

    options = _given_to_soma(arguments, (*_OF_TRAINING, *_OF_READING))
    trained = train(arguments.files, arguments.output, progress_bar=not arguments.quiet, **options)
    what = "held-out" if "validation_bits_per_byte" in trained.history else "training"
    print(f"Wrote {trained.path}: {trained.bits_per_byte:.3f} bits per byte on {what} bytes")


def _embed_soma(arguments: argparse.Namespace) -> None:
    from scforge.soma import embed

    options = _given_to_soma(arguments, (*_OF_EMBEDDING, *_OF_READING))
    table = embed(arguments.files, arguments.model, arguments.output, progress_bar=not arguments.quiet, **options)
    if not arguments.quiet:
        print(f"Wrote {arguments.output}: {len(table):,} vectors of {table.shape[1]} numbers")


def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", nargs="+", metavar="FILE", help="FASTA, csv or tsv, or any other file; .gz as well")
    command.add_argument(
        "--kind", choices=("auto", "bytes", "fasta", "table"), help="how files are read (auto: by their suffix)"
    )
    command.add_argument("--field", metavar="NAME", help="field of FASTA headers with the names, e.g. gene_symbol")
    command.add_argument("--gene-column", metavar="COLUMN", help="column of a table with the names (gene)")
    command.add_argument("--text-column", metavar="COLUMN", help="column of a table with the texts (text)")


def _add_train(command: argparse.ArgumentParser) -> None:
    _add_reading(command)
    command.add_argument("-o", "--output", required=True, metavar="DIR", help="folder of the training")
    command.add_argument("--validation", nargs="+", metavar="FILE", help="files to hold out (default: a share)")
    command.add_argument("--validation-size", type=float, metavar="SHARE", help="share of the bytes to hold out (0.1)")
    command.add_argument("--embedding-dim", type=int, metavar="N", help="width (192)")
    command.add_argument("--pwff-hidden-dim", type=int, metavar="N", help="hidden units (four times the width)")
    command.add_argument("--num-layers", type=int, metavar="N", help="layers (4)")
    command.add_argument("--num-heads", type=int, metavar="N", help="heads (4)")
    command.add_argument("--dropout-rate", type=float, metavar="SHARE", help="dropout (0)")
    command.add_argument("--seq-len", type=int, metavar="N", help="bytes of a sequence (256)")
    command.add_argument("--sig-reg", type=float, metavar="WEIGHT", help="weight of SIGReg (0; as published: 0.02)")
    command.add_argument("--epochs", dest="max_epochs", type=int, metavar="N", help="most epochs (by the bytes)")
    command.add_argument("--max-steps", type=int, metavar="N", help="most steps")
    command.add_argument("--batch-size", type=int, metavar="N", help="sequences a step (16)")
    command.add_argument("--optimizer", metavar="NAME", help="adamw (default), adam, sgd or muon")
    command.add_argument("--lr", type=float, metavar="RATE", help="peak learning rate (0.002; muon: 0.01)")
    command.add_argument("--gradient-checkpointing", action="store_true", default=None, help="less memory, slower")
    command.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if any)")
    command.add_argument("--precision", metavar="NAME", help="precision, e.g. bf16-mixed (default: 32-true)")
    command.add_argument("--checkpoint-every-n-steps", type=int, metavar="N", help="save within epochs as well")
    command.add_argument("--seed", type=int, metavar="N", help="seed of weights, order and split (0)")
    command.add_argument(
        "--resume", metavar="auto|STATE", help="go on: with the latest state, if any, or with this one"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the training in --output")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.set_defaults(run=_train_soma)


def _add_embed(command: argparse.ArgumentParser) -> None:
    _add_reading(command)
    command.add_argument("-m", "--model", required=True, metavar="DIR", help="folder of scforge soma train")
    command.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="table.parquet, table.npz or table.csv, a row a name"
    )
    command.add_argument("--duplicates", choices=("error", "mean"), help="names that stand more than once (error)")
    command.add_argument("--batch-size", type=int, metavar="N", help="sequences at once (32)")
    command.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if any)")
    command.add_argument("--overwrite", action="store_true", help="replace the output")
    command.add_argument("--quiet", action="store_true", help="no progress bar and no summary at the end")
    command.set_defaults(run=_embed_soma)


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
        from scforge.data.readers import similar_file

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
    from scforge.workflows.finetune import finetune_from_config, finetuning_config, finetuning_report
    from scforge.workflows.train import mute_other_processes

    config = finetuning_config(arguments.config, arguments.overrides, flags=_flags_of(arguments))
    options = {"resume": arguments.resume, "overwrite": arguments.overwrite}
    speaks = mute_other_processes()
    result = finetune_from_config(config, progress_bar=not arguments.quiet, **options)
    if speaks:
        print("\n".join(finetuning_report(result, config)))
    return INTERRUPTED if result.model._stopped else 0


def _flags_of(arguments: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """Return the flags that were set, each with its option and its value."""
    values = {flag: getattr(arguments, flag.lstrip("-").replace("-", "_")) for flag in _FLAGS}
    return {flag: (_FLAGS[flag], value) for flag, value in values.items() if value is not None}


def _predict(arguments: argparse.Namespace) -> None:
    check_places(arguments.source, arguments.output, [".csv", ".h5ad"])
    from scforge.workflows.predict import predict_to

    options = {name: getattr(arguments, name) for name in ("threshold", "majority_voting", "soft", "key_added")}
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    options |= _options(arguments.overrides, options)
    options |= {name: getattr(arguments, name) for name in ("batch_size", "device", "overwrite")}
    done = predict_to(arguments.model, arguments.source, arguments.output, **options)
    if not arguments.quiet:
        print(f"Predicted {done}: {arguments.output}")


def _options(overrides: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """Read ``threshold=0.5`` and the like, the values as YAML."""
    from scforge.config.load import parse_yaml

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
    from scforge.eval.report import Report
    from scforge.workflows.evaluate import evaluate_to

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


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as all other mistakes are told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)  # of a command that of the command

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Looks the version up when it is asked for, not at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from scforge._version import __version__

        print(f"scforge {__version__}")
        parser.exit()


def _quickstart(arguments: argparse.Namespace) -> None:
    from scforge._quickstart import run

    run(arguments.output)


def _train(arguments: argparse.Namespace) -> int:
    from scforge.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    if config.output.checkpoint_dir is None and config.output.embedding is None:
        if "checkpoint_dir" in config.output.model_fields_set:
            raise ConfigError(
                "output.checkpoint_dir is empty, so the trained model would be lost; "
                "leave it out for checkpoints/NAME_OF_THE_FILE, or set it."
            )
        config.output.checkpoint_dir = str(Path("checkpoints") / Path(arguments.config).stem)
    for index, path in enumerate(config.data.paths or []):
        check_places(path, place=config._places.of(["data", "paths", index]))
    from scforge.workflows import train_from_config
    from scforge.workflows.train import mute_other_processes, training_report

    options = {"resume": arguments.resume, "overwrite": arguments.overwrite}
    speaks = mute_other_processes()
    model = train_from_config(config, progress_bar=not arguments.quiet, **options)
    if speaks:
        print("\n".join(training_report(model, config)))
    return INTERRUPTED if model._stopped else 0


def _config_init(arguments: argparse.Namespace) -> None:
    from scforge.config import init_config, list_recipes

    if arguments.list:
        print("\n".join(list_recipes()))
        return
    path = init_config(arguments.recipe, arguments.output, overwrite=arguments.overwrite)
    print(f"Wrote {path}. Name your data in it, then: scforge config check {path}")


def _config_show(arguments: argparse.Namespace) -> None:
    from scforge.config import load_config

    config = load_config(arguments.file, arguments.overrides)
    from scforge.workflows.check import show_config

    print(show_config(config), end="")


def _config_check(arguments: argparse.Namespace) -> None:
    from scforge.config import load_config

    config = load_config(arguments.file, arguments.overrides)
    from scforge.workflows import check_config

    print(f"{arguments.file} is fine: {check_config(config)}.")


def _config_schema(arguments: argparse.Namespace) -> None:
    import json

    from scforge.config.editing import config_schema

    schema = config_schema(arguments.output)
    if arguments.output is None:
        print(json.dumps(schema, indent=2))


def _convert(arguments: argparse.Namespace) -> None:
    from scforge.data import convert

    info = convert(
        arguments.sources,
        arguments.output,
        vocab=arguments.vocab,
        obs=None if arguments.obs is None else [name for name in arguments.obs.split(",") if name],
        shuffle=arguments.shuffle,
        seed=arguments.seed,
        memory=arguments.memory,
        layer=arguments.layer,
        gene_key=arguments.gene_key,
        modality=arguments.modality,
        overwrite=arguments.overwrite,
        progress=not arguments.quiet,
    )
    if not arguments.quiet:
        print(info)


def _embed(arguments: argparse.Namespace) -> None:
    check_places(arguments.source, arguments.output, [".zarr", ".h5ad"])
    from scforge.workflows import embed_to

    names = ("key", "batch_size", "rank", "world_size", "device", "overwrite")
    options = {name: getattr(arguments, name) for name in names}
    info = embed_to(arguments.model, arguments.source, arguments.output, **options, progress_bar=not arguments.quiet)
    if not arguments.quiet:
        print(info)


def _inspect(arguments: argparse.Namespace) -> None:
    from scforge.data import inspect_h5ad, inspect_store
    from scforge.data.store import may_be_store

    if may_be_store(arguments.file):
        print(inspect_store(arguments.file, verify=arguments.verify))
        return
    if arguments.verify:
        raise OptionError(f"--verify checks a store, and {arguments.file!r} is none; leave it out.")
    found = inspect_h5ad(
        arguments.file, arguments.vocab, layer=arguments.layer, gene_key=arguments.gene_key, n_top=arguments.top
    )
    print(found)
    found.check()


def _add_config(config: argparse.ArgumentParser) -> None:
    commands = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    init = commands.add_parser("init", help="write a recipe to edit")
    init.add_argument("recipe", nargs="?", default="light", metavar="RECIPE", help="its name (%(default)s)")
    init.add_argument("-o", "--output", metavar="FILE", help="file to write (RECIPE.yaml)")
    init.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    init.add_argument("--list", action="store_true", help="list the recipes, and write nothing")
    init.set_defaults(run=_config_init)
    for name, run, words in (
        ("show", _config_show, "show a file with all defaults that will be used"),
        ("check", _config_check, "check what can be checked without reading the cells"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("file", metavar="FILE", help="YAML or TOML file")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. training.batch_size=32")
        command.set_defaults(run=run)
    schema = commands.add_parser("schema", help="print the JSON schema of YAML files, for editors")
    schema.add_argument("-o", "--output", metavar="FILE", help="write it to a file instead")
    schema.set_defaults(run=_config_schema)


def _parser() -> _Parser:
    parser = _Parser(prog="scforge", description="Train single-cell foundation models on AnnData.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    quickstart = commands.add_parser("quickstart", help="train on embedded real data; leave a picture and a report")
    quickstart.add_argument(
        "--output", default="quickstart", metavar="DIR", help="folder for the results (%(default)s)"
    )
    quickstart.set_defaults(run=_quickstart)

    train = commands.add_parser("train", help="train a model as a YAML or TOML file says")
    train.add_argument("--config", required=True, metavar="FILE", help="YAML or TOML file")
    train.add_argument("--resume", metavar="auto|STATE", help="go on: with the latest state, if any, or with this one")
    train.add_argument("--overwrite", action="store_true", help="replace the run in output.checkpoint_dir")
    train.add_argument("--quiet", action="store_true", help="no progress bar")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. training.batch_size=32")
    train.set_defaults(run=_train)
    _add_config(commands.add_parser("config", help="write, show or check a YAML file"))

    convert = commands.add_parser("convert", help="make a store, from which models train, of data of any size")
    convert.add_argument("sources", nargs="+", metavar="SOURCE", help="path, pattern or URL of h5ad or AnnData-zarr")
    convert.add_argument("-o", "--output", required=True, metavar="STORE", help="folder to write, e.g. store.zarr")
    convert.add_argument("--vocab", metavar="NAME_OR_FILE", help="a vocabulary (default: all genes of all sources)")
    convert.add_argument("--obs", metavar="COLUMNS", help="columns of obs, e.g. cell_type,batch (default: all shared)")
    convert.add_argument(
        "--shuffle", action=argparse.BooleanOptionalAction, default=True, help="bring the cells into random order"
    )
    convert.add_argument("--seed", type=int, default=0, metavar="N", help="seed of that order (%(default)s)")
    convert.add_argument("--memory", default="4GB", metavar="SIZE", help="memory to take, about (%(default)s)")
    convert.add_argument("--layer", metavar="LAYER", help="layer with raw counts (default: X)")
    convert.add_argument("--gene-key", metavar="COLUMN", help="column of var with the gene names (default: var_names)")
    convert.add_argument("--modality", metavar="NAME", help="modality of an h5mu file")
    convert.add_argument("--overwrite", action="store_true", help="replace a store")
    convert.add_argument("--quiet", action="store_true", help="no progress bar and no description at the end")
    convert.set_defaults(run=_convert)

    add_convert_checkpoint(
        commands.add_parser("convert-checkpoint", help="make a model of a checkpoint that another package published")
    )

    embed = commands.add_parser("embed", help="embed cells with a trained model; killed, it continues where it was")
    embed.add_argument("source", metavar="STORE_OR_H5AD", help="store, h5ad, AnnData-zarr, pattern or URL")
    embed.add_argument(
        "-m", "--model", required=True, metavar="MODEL", help="its folder, org/name on the hub, or scforge://name"
    )
    embed.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="out.zarr or out.h5ad: obs and the embedding, no genes"
    )
    embed.add_argument("--key", default="auto", metavar="KEY", help="key in obsm (X_scforge)")
    embed.add_argument("--batch-size", type=int, default=256, metavar="N", help="cells at once (%(default)s)")
    embed.add_argument("--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if any)")
    embed.add_argument("--rank", type=int, metavar="N", help="which of several processes this is, from 0")
    embed.add_argument("--world-size", type=int, metavar="N", help="how many (default: what torchrun or srun say)")
    embed.add_argument("--overwrite", action="store_true", help="replace another embedding, or an unfinished one")
    embed.add_argument("--quiet", action="store_true", help="no progress bar and no summary at the end")
    embed.set_defaults(run=_embed)

    add_finetune(commands.add_parser("finetune", help="train a copy of a model for a task, e.g. annotation"))
    add_predict(commands.add_parser("predict", help="predict cells with a fine-tuned model"))
    help_of_evaluate = "score a model's embedding, or the predictions of a fine-tuned one, with baselines"
    add_evaluate(commands.add_parser("evaluate", help=help_of_evaluate))

    add_push(commands.add_parser("push", help="send a model to the hub"))
    add_pull(commands.add_parser("pull", help="fetch a model, by its name on the hub or in the registry"))

    add_soma(commands.add_parser("soma", help="models of bytes: of sequences, descriptions, any file"))

    inspect = commands.add_parser("inspect", help="show what an h5ad file or a store holds, and which vocabulary fits")
    inspect.add_argument("file", metavar="FILE", help="h5ad file of any size, or a store")
    inspect.add_argument("--verify", action="store_true", help="read a whole store and check that nothing is damaged")
    inspect.add_argument("--vocab", metavar="NAME_OR_FILE", help="a vocabulary (default: the shipped one that fits)")
    inspect.add_argument("--gene-key", metavar="COLUMN", help="column of var with the gene names (default: var_names)")
    inspect.add_argument("--layer", metavar="LAYER", help="layer to look at (default: X)")
    inspect.add_argument("--top", type=int, default=10, metavar="N", help="missing genes to name (%(default)s)")
    inspect.set_defaults(run=_inspect)
    return parser


class _ShowOnce:
    """Shows each warning once, on one line; several steps of a command may find the same."""

    def __init__(self) -> None:
        self.shown: set[str] = set()

    def __call__(self, message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        line = " ".join(str(message).split())
        if line not in self.shown:
            self.shown.add(line)
            print(f"scforge: warning: {line}", file=sys.stderr)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; overrides may stand on both sides of a flag, which argparse cannot do below a command."""
    arguments, others = _parser().parse_known_args(argv)
    takes = hasattr(arguments, "overrides")
    for other in others:
        if takes and not other.startswith("-"):
            arguments.overrides.append(other)
            continue
        option = other.lstrip("-")
        if takes and ("." in option.partition("=")[0] or "=" in option):
            written = option if "=" in option else f"{option}=VALUE"
            arguments.parser.error(f"{other} is an option of the YAML file; write {written} without the dashes")
        arguments.parser.error(f"unrecognized argument: {other}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 2 after a mistake of the user, which one line on stderr names, or 130 after Ctrl-C.

    Parameters
    ----------
    argv
        Arguments after the program's name; those of the process if None.
    """
    arguments = _parse(argv)
    # Where the result is one line, for another program to read, remarks stand beside it.
    remarks = sys.stderr if getattr(arguments, "prints_result", False) else sys.stdout
    logging.basicConfig(format="%(message)s", stream=remarks)
    logging.getLogger("scforge").setLevel(logging.INFO)
    with warnings.catch_warnings():
        # The libraries' remarks to developers help nobody here; scforge's own are for the user.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", category=ScforgeWarning)
        warnings.showwarning = _ShowOnce()
        try:
            return arguments.run(arguments) or 0
        except (ScforgeError, OSError) as error:
            print(f"scforge: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("scforge: interrupted", file=sys.stderr)
            return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

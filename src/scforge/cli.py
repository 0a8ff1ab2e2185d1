"""The command line, with one parser, and one function per command that receives the given flags by name."""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from scforge._lazy import announced_loading, silent_loading
from scforge._text import printable
from scforge.errors import ON_COMMAND_LINE, ConfigError, OptionError, ScforgeError, ScforgeWarning

INTERRUPTED = 130
"""Exit code after Ctrl-C, even if training saved its results, so that a script does not continue."""

_OTHER_SECTIONS = {
    "data": "data.paths",
    "eval": "finetune.evaluate",
    "max_epochs": "training.max_epochs",
    "output": "output.checkpoint_dir",
    "seed": "seed",
}
"""A mapping from ``scforge finetune`` flags to YAML options; other flags set options of the section ``finetune``."""

_BATCH_SIZE: dict[str, Any] = {"type": int, "metavar": "N", "help": "cells per batch (256)"}

_DEVICE: dict[str, Any] = {"metavar": "DEVICE", "help": "cpu, cuda, cuda:1 (default: a GPU if available)"}

_RESUME: dict[str, Any] = {"metavar": "auto|DIR", "help": "resume from the latest checkpoint, or from this one"}

_GENE_KEY: dict[str, Any] = {"metavar": "COLUMN", "help": "column of var with the gene names (default: var_names)"}


def _say(text: object, *, to: TextIO | None = None, end: str = "\n") -> None:
    """Print text, in which nothing controls the terminal; names in it can come from the files of other people."""
    print(printable(text), file=to, end=end)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the message, in which nothing controls the terminal."""
        return printable(super().format(record))


def _quickstart(**options: Any) -> None:
    from scforge._quickstart import run

    run(**options)


def _loaded(config: str, overrides: list[str]) -> Any:
    """Load a configuration, with the default folder for the training run if no folder is set."""
    from scforge.config import load_config

    loaded = load_config(config, overrides)
    if loaded.output.checkpoint_dir is None and loaded.output.embedding is None:
        if "checkpoint_dir" in loaded.output.model_fields_set and loaded.finetune is None:
            raise ConfigError(
                "output.checkpoint_dir is empty, so the trained model would be lost; "
                "set output.checkpoint_dir, or remove it to use checkpoints/NAME_OF_THE_FILE."
            )
        loaded.output.checkpoint_dir = str(Path("checkpoints") / Path(config).stem)
    return loaded


def _train(config: str, overrides: list[str], *, quiet: bool = False, **options: Any) -> int:
    from scforge.workflows.places import check_start, check_trains

    loaded = _loaded(config, overrides)
    check_trains(loaded)
    check_start(loaded, resume=options.get("resume"), overwrite=options.get("overwrite", False))
    with announced_loading():
        from scforge.workflows import train_from_config
        from scforge.workflows.train import mute_other_processes, training_report

    speaks = mute_other_processes()
    model = train_from_config(loaded, progress_bar=not quiet, **options)
    if speaks:
        _say("\n".join(training_report(model, loaded)))
    return INTERRUPTED if model.fitted.stopped else 0


def _finetune(
    overrides: list[str],
    *,
    config: str | None = None,
    quiet: bool = False,
    resume: str | None = None,
    overwrite: bool = False,
    **flags: Any,
) -> int:
    from scforge.workflows.models import check_local_model
    from scforge.workflows.places import check_start, finetune_section, finetuning_config

    given = {
        f"--{name.replace('_', '-')}": (_OTHER_SECTIONS.get(name, f"finetune.{name}"), value)
        for name, value in flags.items()
    }
    loaded = finetuning_config(config, overrides, flags=given)
    base_model = finetune_section(loaded).base_model
    check_start(loaded, resume=resume, overwrite=overwrite)
    check_local_model(base_model, f"finetune.base_model={base_model!r} (--base-model)")
    with announced_loading():
        from scforge.workflows.finetune import finetune_from_config, finetuning_report
        from scforge.workflows.train import mute_other_processes
    speaks = mute_other_processes()
    result = finetune_from_config(loaded, progress_bar=not quiet, resume=resume, overwrite=overwrite)
    if speaks:
        _say("\n".join(finetuning_report(result, loaded)))
    return INTERRUPTED if result.model.fitted.stopped else 0


def _embed(source: str, model: str, output: str, *, quiet: bool = False, **options: Any) -> None:
    from scforge.data.paths import check_exists
    from scforge.workflows.models import check_local_model
    from scforge.workflows.outputs import check_ending

    check_exists(source)
    check_ending(output, [".zarr", ".h5ad"])
    check_local_model(model, f"model={model!r} (--model)", adapters=True)
    with announced_loading():
        from scforge.workflows import embed_to

    info = embed_to(model, source, output, progress_bar=not quiet, **options)
    if not quiet:
        _say(info)


def _predict(
    source: str, model: str, output: str, overrides: list[str], *, quiet: bool = False, **options: Any
) -> None:
    from scforge.data.paths import check_exists
    from scforge.workflows.models import check_local_model
    from scforge.workflows.outputs import output_file

    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.isidentifier() or name in {*options, "model", "source", "output"}:
            raise OptionError(f"{override!r} is not a prediction option of the task; pass each once, as name=value.")
        from scforge.config.load import parse_yaml

        options[name] = parse_yaml(text, where=override)[0]
    check_exists(source)
    output_file(output, [".csv", ".h5ad"], overwrite=options.get("overwrite", False), inputs=[source])
    check_local_model(model, f"model={model!r} (--model)", adapters=True)
    with announced_loading():
        from scforge.workflows.predict import predict_to

    done = predict_to(model, source, output, **options)
    if not quiet:
        _say(f"Predicted {done}: {output}")


def _annotate(source: str, reference: str, output: str, *, quiet: bool = False, **options: Any) -> None:
    from scforge.data.paths import check_exists
    from scforge.workflows.models import check_local_model
    from scforge.workflows.outputs import output_file

    check_exists(source)
    overwrite, inputs = options.get("overwrite", False), [source, reference]
    output_file(output, [".csv", ".h5ad"], overwrite=overwrite, inputs=inputs)
    if "plot" in options:
        output_file(options["plot"], [".png"], overwrite=overwrite, inputs=inputs)
    if reference.endswith(".h5ad"):
        check_exists(reference)
    else:
        check_local_model(reference, f"reference={reference!r} (--reference)")
    with announced_loading():
        from scforge.workflows.annotate import annotate_to

    report = annotate_to(source, reference, output, progress_bar=not quiet, **options)
    if not quiet:
        _say(report, end="")
        _say(f"Written: {output}" + (f", {options['plot']}" if "plot" in options else ""))


def _evaluate(
    model: list[str],
    *,
    source: str | None = None,
    data: str | None = None,
    output: str | None = None,
    against: Sequence[str] = (),
    baselines: bool = True,
    quiet: bool = False,
    **options: Any,
) -> None:
    from scforge.data.paths import check_exists
    from scforge.workflows.models import check_local_model
    from scforge.workflows.outputs import check_scores

    if (source is None) == (data is None):
        raise OptionError("the cells must be given exactly once; pass either FILE or --data FILE.")
    if against and not baselines:
        raise OptionError("--against selects baselines, but --no-baselines excludes them; remove one of the two.")
    cells = str(data if source is None else source)
    learned, base = options.get("trained_on"), options.get("base_model")
    if Path(cells).suffix:  # of a file; data sets have none
        check_exists(cells)
    if learned is not None:
        check_exists(learned)
    if output is not None:
        inputs = [cells] if learned is None else [cells, learned]
        check_scores(Path(output), overwrite=options.get("overwrite", False), inputs=inputs)
    for one in model:
        check_local_model(one, f"model={one!r} (--model)", adapters=True)
    if base is not None:
        check_local_model(base, f"base_model={base!r} (--base-model)", adapters=True)
    with announced_loading():
        from scforge.eval.report import Report
        from scforge.workflows.evaluate import evaluate_to

    chosen = [int(name) if name.isdigit() else name for name in against] or baselines
    found = evaluate_to(model, cells, output, baselines=chosen, progress_bar=not quiet, **options)
    _say(found if isinstance(found, Report) else found.round(4).to_string())
    if output is not None:
        _say(f"Written: {output}")


def _config_init(*, only_list: bool = False, **options: Any) -> None:
    from scforge.config import list_recipes
    from scforge.config.editing import init_config

    if only_list:
        _say("\n".join(list_recipes()))
        return
    path = init_config(**options)
    _say(f"Wrote {path}. Set the data paths in this file, then run: scforge config check {path}")


def _config_show(file: str, overrides: list[str]) -> None:
    from scforge.config import load_config

    config = load_config(file, overrides)
    with announced_loading():
        from scforge.workflows.check import show_config

    _say(show_config(config), end="")


def _config_check(file: str, overrides: list[str]) -> None:
    config = _loaded(file, overrides)
    from scforge.workflows.places import check_places

    check_places(config)
    with announced_loading():
        from scforge.workflows import check_config

    _say(f"{file} is fine: {check_config(config)}.")


def _config_schema(output: str | None = None, **options: bool) -> None:
    import json

    from scforge.config.editing import config_schema

    schema = config_schema(output, **options)
    if output is None:
        _say(json.dumps(schema, indent=2))


def _convert(sources: list[str], output: str, *, obs: str | None = None, quiet: bool = False, **options: Any) -> None:
    from scforge.data.paths import check_exists, check_target

    check_target(output, options.get("overwrite", False), options.get("append", False))
    for source in sources:
        check_exists(source)
    with announced_loading():
        from scforge.data import convert

    # As in a csv file, so that quotes protect a comma.
    columns = None if obs is None else [name for name in next(csv.reader([obs], skipinitialspace=True)) if name]
    info = convert(sources, output, obs=columns, progress=not quiet, **options)
    if not quiet:
        _say(info)


def _convert_checkpoint(source: str, output: str, *, overwrite: bool = False, **options: Any) -> None:
    from scforge._io import check_writable

    check_writable("output", output)
    with announced_loading():
        from scforge.estimators import Encoder

    model = Encoder.from_checkpoint(source, **options)
    model.save(output, overwrite=overwrite)
    _say(f"Wrote {output}: {model.spec.architecture}, {model.vocab}")


def _inspect(file: str, *, verify: bool = False, **options: Any) -> None:
    from scforge.data.paths import check_exists

    check_exists(file)
    with announced_loading():
        from scforge.data.sources import inspect_h5ad
        from scforge.data.store import inspect_store, may_be_store

    if may_be_store(file):
        _say(inspect_store(file, verify=verify))
        return
    if verify:
        raise OptionError(f"--verify works only for stores, but {file!r} is not a store; omit --verify.")
    found = inspect_h5ad(file, **options)
    _say(found)
    found.check()


def _push(folder: str, repo_id: str, **options: Any) -> None:
    from scforge.workflows.models import push_folder

    _say(push_folder(folder, repo_id, **options))


def _pull(name: str, **options: Any) -> None:
    from scforge.workflows.models import pull_folder

    _say(pull_folder(name, **options))


def _train_soma(files: list[str], output: str, *, quiet: bool = False, **options: Any) -> None:
    from scforge.soma import train

    trained = train(files, output, progress_bar=not quiet, **options)
    what = "held-out" if "validation_bits_per_byte" in trained.history else "training"
    _say(f"Wrote {trained.path}: {trained.bits_per_byte:.3f} bits per byte on {what} bytes")


def _embed_soma(files: list[str], model: str, output: str, *, quiet: bool = False, **options: Any) -> None:
    from scforge.soma import embed

    table = embed(files, model, output, progress_bar=not quiet, **options)
    if not quiet:
        _say(f"Wrote {output}: {len(table):,} vectors of {table.shape[1]} numbers")


class _Parser(argparse.ArgumentParser):
    """Parser that reports usage errors in one line, like other errors, and omits flags that are not set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"argument_default": argparse.SUPPRESS, **kwargs})
        self.set_defaults(parser=self)  # of a command that of the command

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: error: {message} (see {self.prog} --help)\n"))


class _Version(argparse.Action):
    """Action that looks up the version on request, not at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from scforge._version import __version__

        _say(f"scforge {__version__}")
        parser.exit()


class _MayStandAlone(argparse.Action):
    """Action of a flag with an optional value; KEY=VALUE after the flag is not its value, but an override."""

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
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of layers; pass a number, or omit the value to train only the head"
        )
    return int(text)


def _add_overrides(command: argparse.ArgumentParser, words: str) -> None:
    # Extended, not set, because flags add to them as well.
    command.add_argument("overrides", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help=words)


def _add_train(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--config", required=True, metavar="FILE", help="YAML or TOML file")
    add("--resume", **_RESUME)
    add("--overwrite", action="store_true", help="replace the run in output.checkpoint_dir")
    add("--quiet", action="store_true", help="no progress bar")
    _add_overrides(command, "e.g. training.batch_size=32")
    command.set_defaults(run=_train)


def _add_config(config: argparse.ArgumentParser) -> None:
    commands = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    init = commands.add_parser("init", help="write a recipe to edit")
    init.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of the recipe (light)")
    init.add_argument("-o", "--output", metavar="FILE", help="file to write (RECIPE.yaml)")
    init.add_argument("--overwrite", action="store_true", help="replace an existing file")
    init.add_argument("--list", dest="only_list", action="store_true", help="list the recipes, without writing a file")
    init.set_defaults(run=_config_init)
    for name, run, words in (
        ("show", _config_show, "show a file with all defaults that will be used"),
        ("check", _config_check, "check everything that does not require reading the cells"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("file", metavar="FILE", help="YAML or TOML file")
        _add_overrides(command, "e.g. training.batch_size=32")
        command.set_defaults(run=run)
    schema = commands.add_parser("schema", help="print the JSON schema of YAML files, for editors")
    schema.add_argument("-o", "--output", metavar="FILE", help="write it to a file instead")
    schema.add_argument("--overwrite", action="store_true", help="replace an existing file")
    schema.set_defaults(run=_config_schema)


def _add_convert(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="path, pattern or URL of h5ad or AnnData-zarr")
    add("-o", "--output", required=True, metavar="STORE", help="folder to write, e.g. store.zarr")
    add("--vocab", metavar="NAME_OR_FILE", help="a vocabulary (default: all genes of all sources)")
    add("--obs", metavar="COLUMNS", help="columns of obs, e.g. cell_type,batch (default: all shared); quote a comma")
    add("--shuffle", action=argparse.BooleanOptionalAction, help="shuffle the cells (default: on)")
    add("--seed", type=int, metavar="N", help="seed of the order (0)")
    add("--memory", metavar="SIZE", help="approximate memory limit (4GB)")
    add("--layer", metavar="LAYER", help="layer with raw counts (default: X)")
    add("--gene-key", **_GENE_KEY)
    add("--modality", metavar="NAME", help="modality of an h5mu file")
    add("--overwrite", action="store_true", help="replace a store")
    add("--append", action="store_true", help="add the cells to an existing store")
    add("--quiet", action="store_true", help="no progress bar and no description")
    command.set_defaults(run=_convert)


def _add_convert_checkpoint(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    pooling = "Geneformer: genes (default of V1), cls (of V2) or mean; scFoundation: depths (default) or mean"
    add("source", metavar="SOURCE", help="folder or file of the checkpoint")
    add("-o", "--output", required=True, metavar="DIR", help="folder of the new model")
    add("--family", metavar="NAME", help="geneformer, scgpt, ... (default: detected)")
    add("--version", metavar="NAME", help="Geneformer: V1 or V2 (default: detected)")
    add("--tokens-medians", metavar="PLACE", help="Geneformer: folder or table of its dictionaries (default: SOURCE)")
    add("--ensembl-map", metavar="FILE", help="Geneformer: former Ensembl ids to current ones")
    add("--gene-names", metavar="FILE", help="Geneformer: symbols to Ensembl ids")
    add("--pooling", metavar="NAME", help=pooling)
    add("--embedding-layer", type=int, metavar="N", help="Geneformer: embed from the Nth layer below the last (1)")
    add("--vocab", metavar="FILE", help="scGPT: its vocab.json; scFoundation: its gene panel")
    add("--args", metavar="FILE", help="scGPT: its args.json")
    add("--cls-value", type=float, metavar="VALUE", help="scGPT: value of CLS (default: pad_value)")
    add("--normalize", action="store_true", help="scGPT: embeddings of length 1, as embed_data")
    add("--part", metavar="NAME", help="scFoundation: cell, gene or rde")
    add("--overwrite", action="store_true", help="replace the model in --output; other files stay")
    command.set_defaults(run=_convert_checkpoint)


def _add_embed(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    place = "folder, hf://org/name on the hub, or scforge://name"
    counts = "also write the genes and counts of a single h5ad file (default: on)"
    add("source", metavar="STORE_OR_H5AD", help="store, h5ad, AnnData-zarr, pattern or URL")
    add("-m", "--model", required=True, metavar="MODEL", help=place)
    add("-o", "--output", required=True, metavar="FILE", help="out.h5ad or out.zarr")
    add("--counts", action=argparse.BooleanOptionalAction, help=counts)
    add("--key", metavar="KEY", help="key in obsm (X_scforge)")
    add("--correction", type=float, default=0.0, metavar="SHARE", help="correct for batches, from 0 (default) to 1")
    add("--batch-size", **_BATCH_SIZE)
    add("--device", **_DEVICE)
    add("--rank", type=int, metavar="N", help="rank of this process, from 0")
    add("--world-size", type=int, metavar="N", help="number of processes (default: from torchrun or srun)")
    add("--overwrite", action="store_true", help="replace another embedding, or an unfinished one")
    add("--quiet", action="store_true", help="no progress bar and no summary")
    command.set_defaults(run=_embed)


def _add_finetune(command: argparse.ArgumentParser) -> None:
    add, alone = command.add_argument, _MayStandAlone
    add("--config", metavar="FILE", help="YAML or TOML file with a section finetune; flags take precedence")
    add("--base-model", metavar="MODEL", help="the model to fine-tune: folder, hf://org/name or scforge://name")
    add("--data", metavar="FILE", help="h5ad file, or a store")
    add("--task", metavar="NAME", help="annotation, integration, perturbation, regression, ...")
    add("--labels-key", metavar="COLUMN", help="column of obs with the labels")
    add("--batch-key", metavar="COLUMN", help="column of obs with the batches")
    add("--perturbation-key", metavar="COLUMN", help="column of obs with the perturbations")
    add("--control", metavar="LABEL", help="label of the control cells")
    add("--validation-size", type=float, metavar="SHARE", help="fraction of the cells (0.1)")
    add("--test-size", type=float, metavar="SHARE", help="fraction of the cells, for --eval (0.1)")
    add("--split-by", metavar="COLUMN", help="hold out whole groups, e.g. donors")
    add("--split-key", metavar="COLUMN", help="column of obs with train, validation or test")
    add("--freeze", action=alone, type=_layers, metavar="N", help="train the head only, or freeze N layers")
    add("--lora", action="store_true", help="train low-rank adapters only")
    add("--max-epochs", type=int, metavar="N", help="maximum epochs (default: by task and cells)")
    add("--seed", type=int, metavar="N", help="seed of split, head and order (0)")
    add("--eval", action=alone, metavar="NAME", help="score the test set, with baselines")
    add("-o", "--output", metavar="DIR", help="folder of the run (default: DATA_TASK)")
    add("--resume", **_RESUME)
    add("--overwrite", action="store_true", help="replace the run in --output")
    add("--quiet", action="store_true", help="no progress bar")
    _add_overrides(command, "e.g. training.lr=1e-4 finetune.lora.r=16")
    command.set_defaults(run=_finetune)


def _add_predict(command: argparse.ArgumentParser) -> None:
    add, vote = command.add_argument, "also a majority vote per cluster (of COLUMN)"
    add("source", metavar="FILE", help="h5ad file, store, pattern or URL")
    add("-m", "--model", required=True, metavar="MODEL", help="fine-tuned: folder, hf://org/name or scforge://name")
    add("-o", "--output", required=True, metavar="FILE", help="out.h5ad (the cells) or out.csv")
    add("--threshold", type=float, metavar="SHARE", help='less certain cells become "unassigned"')
    add("--majority-voting", action=_MayStandAlone, metavar="COLUMN", help=vote)
    add("--soft", action="store_true", help="probabilities of all classes")
    mapping = "map cells that the model was not fine-tuned on (default: on)"
    add("--map-query", action=argparse.BooleanOptionalAction, help=mapping)
    add("--key-added", metavar="NAME", help="column of obs to write")
    add("--batch-size", **_BATCH_SIZE)
    add("--device", **_DEVICE)
    add("--overwrite", action="store_true", help="replace the output")
    add("--quiet", action="store_true", help="no summary")
    _add_overrides(command, "further options of the task's predict")
    command.set_defaults(run=_predict)


def _add_annotate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    place = "labeled cells (h5ad), or a model: folder, hf://org/name or scforge://name, e.g. scforge://human-blood"
    add("source", metavar="FILE", help="h5ad file with raw counts")
    add("--reference", required=True, metavar="PLACE", help=place)
    add("-o", "--output", required=True, metavar="FILE", help="out.h5ad (the cells) or out.csv")
    add("--labels-key", metavar="COLUMN", help="column of obs of the reference with the labels (cell_type)")
    add("--batch-key", metavar="COLUMN", help="column of obs of the reference with batches, e.g. donors")
    add(
        "--query-batch-key",
        metavar="COLUMN",
        help="column of obs of FILE with batches (default: that of the reference)",
    )
    add("--unknown", type=float, metavar="RATE", help='error rate for the label "unknown", e.g. 0.05 (default: none)')
    add("--min-probability", type=float, metavar="P", help='less certain cells become "unassigned"')
    add("--broader", metavar="COLUMN", help="column of the reference with broader labels, for less certain cells")
    add("--plot", metavar="FILE", help="also write a picture, e.g. umap.png")
    add("--layer", metavar="LAYER", help="layer with raw counts (default: X)")
    add("--gene-key", **_GENE_KEY)
    add("--key-added", metavar="NAME", help="column of obs to write")
    add("--seed", type=int, metavar="N", help="seed of training (0)")
    add("--overwrite", action="store_true", help="replace the output")
    add("--quiet", action="store_true", help="no progress bar and no report")
    command.set_defaults(run=_annotate)


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    add, switch = command.add_argument, argparse.BooleanOptionalAction
    place = "folder, hf://org/name or scforge://name; repeat to compare several models"
    benchmarks = (
        "score the embedding by these (default: a fine-tuned model by its task, others by cell_type_probe, scib and "
        "geometry)"
    )
    against = "baselines of embeddings, e.g. pca harmony (default: all; scvi takes minutes)"
    add("source", nargs="?", metavar="FILE", help="cells: an h5ad file, or a data set, e.g. pbmc3k")
    add("--data", metavar="FILE", help="the cells, as an option instead of FILE")
    add("-m", "--model", required=True, action="append", metavar="MODEL", help=place)
    add("-o", "--output", metavar="PLACE", help="write the scores (out.csv) or a report (a folder)")
    add("--benchmarks", nargs="+", metavar="NAME", help=benchmarks)
    add("--against", nargs="+", metavar="NAME", help=against)
    add("--obsm-keys", nargs="+", metavar="KEY", help="embeddings in FILE to compare")
    add("--labels-key", metavar="COLUMN", help="column of obs with the cell types")
    add("--batch-key", metavar="COLUMN", help="column of obs with the batches")
    add(
        "--groups-key",
        metavar="COLUMN",
        help="column of obs with donors; folds hold out, and intervals resample, whole donors",
    )
    add("--network", metavar="FILE", help="true edges, for the benchmark gene_network")
    add("--gene-key", metavar="COLUMN", help="column of var with the gene names of --network")
    add("--seeds", type=int, metavar="N", help="seeds of folds (3)")
    add("--intervals", action=switch, help="confidence intervals and tests (default: on)")
    add("--untrained", action=switch, help="include an untrained control (default: on)")
    add("--baselines", action=switch, help="score baselines if possible (default: on)")
    mapping = "map cells that a fine-tuned model was not fine-tuned on (default: on)"
    add("--map-query", action=switch, help=mapping)
    add("--trained-on", metavar="FILE", help="cells of the fine-tuning, if FILE has others")
    add("--base-model", metavar="MODEL", help="model before fine-tuning, for its frozen embedding")
    add("--batch-size", **_BATCH_SIZE)
    add("--device", **_DEVICE)
    add("--seed", type=int, metavar="N", help="seed of baselines (0)")
    add("--overwrite", action="store_true", help="replace the output")
    add("--quiet", action="store_true", help="no progress messages")
    command.set_defaults(run=_evaluate)


def _add_push(command: argparse.ArgumentParser) -> None:
    add, private = command.add_argument, "create a private repository (default: setting of the hub)"
    add("folder", metavar="DIR", help="folder of a model, or of adapters")
    add("repo_id", metavar="REPO", help="org/name; created if missing")
    add("--private", action=argparse.BooleanOptionalAction, help=private)
    add("--revision", metavar="BRANCH", help="branch to write to (default: the main one)")
    add("--message", dest="commit_message", metavar="TEXT", help="first line of the commit")
    add("--pr", dest="create_pr", action="store_true", help="open a pull request instead")
    add("--license", metavar="NAME", help="for the card, e.g. apache-2.0")
    add("--data", nargs="+", metavar="NAME", help="for the card: the training data")
    add("--citation", metavar="TEXT", help="for the card: how to cite the model")
    add("--metrics", metavar="FILE", help="for the card: out.csv of scforge evaluate, with baselines")
    add("--base", metavar="NAME", help="of adapters: org/name of their base model")
    add("--reference", action="store_true", help="also push the counts of labeled cells (reference.safetensors)")
    command.set_defaults(run=_push, prints_result=True)


def _add_pull(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("name", metavar="NAME", help="org/name, hf://org/name@revision, or scforge://name@version")
    add("-o", "--output", metavar="DIR", help="folder to write (default: the cache)")
    add("--revision", metavar="NAME", help="branch, tag or commit (default: the main branch)")
    add("--cache-dir", metavar="DIR", help="use this cache directory")
    add("--offline", dest="local_files_only", action="store_true", help="use the cache only")
    add("--overwrite", action="store_true", help="replace the model in --output; other files stay")
    command.set_defaults(run=_pull, prints_result=True)


def _add_soma(soma: argparse.ArgumentParser) -> None:
    commands = soma.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = commands.add_parser("train", help="train a model on files")
    embed = commands.add_parser("embed", help="embed files, records or descriptions; write a table of gene vectors")
    kinds = ("auto", "bytes", "fasta", "table")
    for command in (train, embed):
        add = command.add_argument
        add("files", nargs="+", metavar="FILE", help="FASTA, csv or tsv, or any other file; .gz as well")
        add("--kind", choices=kinds, help="file type (auto: by suffix)")
        add("--field", metavar="NAME", help="field of FASTA headers with the names, e.g. gene_symbol")
        add("--gene-column", metavar="COLUMN", help="column of a table with the names (gene)")
        add("--text-column", metavar="COLUMN", help="column of a table with the texts (text)")
    add = train.add_argument
    add("-o", "--output", required=True, metavar="DIR", help="folder of the run")
    add("--validation", nargs="+", metavar="FILE", help="files to hold out (default: a fraction)")
    add("--validation-size", type=float, metavar="SHARE", help="fraction of the bytes to hold out (0.1)")
    add("--embedding-dim", type=int, metavar="N", help="width (192)")
    add("--pwff-hidden-dim", type=int, metavar="N", help="hidden units (four times the width)")
    add("--num-layers", type=int, metavar="N", help="layers (4)")
    add("--num-heads", type=int, metavar="N", help="heads (4)")
    add("--dropout-rate", type=float, metavar="SHARE", help="dropout (0)")
    add("--seq-len", type=int, metavar="N", help="bytes per sequence (256)")
    add("--sig-reg", type=float, metavar="WEIGHT", help="weight of SIGReg (0; as published: 0.02)")
    add("--epochs", dest="max_epochs", type=int, metavar="N", help="maximum epochs (default: by file size)")
    add("--max-steps", type=int, metavar="N", help="maximum steps")
    add("--batch-size", type=int, metavar="N", help="sequences per step (16)")
    add("--optimizer", metavar="NAME", help="adamw (default), adam, sgd or muon")
    add("--lr", type=float, metavar="RATE", help="peak learning rate (0.002; muon: 0.01)")
    add("--gradient-checkpointing", action="store_true", help="less memory, slower")
    add("--device", **_DEVICE)
    add("--precision", metavar="NAME", help="precision, e.g. bf16-mixed (default: 32-true)")
    add("--checkpoint-every-n-steps", type=int, metavar="N", help="save within epochs as well")
    add("--seed", type=int, metavar="N", help="seed of weights, order and split (0)")
    add("--resume", **_RESUME)
    add("--overwrite", action="store_true", help="replace the run in --output")
    add("--quiet", action="store_true", help="no progress bar")
    train.set_defaults(run=_train_soma)
    add, output = embed.add_argument, "table.parquet, table.npz or table.csv, a row per name"
    add("-m", "--model", required=True, metavar="DIR", help="folder of scforge soma train")
    add("-o", "--output", required=True, metavar="FILE", help=output)
    add("--duplicates", choices=("error", "mean"), help="repeated names (error)")
    add("--batch-size", type=int, metavar="N", help="sequences per batch (32)")
    add("--device", **_DEVICE)
    add("--overwrite", action="store_true", help="replace the output")
    add("--quiet", action="store_true", help="no progress bar and no summary")
    embed.set_defaults(run=_embed_soma)


def _add_inspect(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("file", metavar="FILE", help="h5ad file of any size, or a store")
    add("--verify", action="store_true", help="read a whole store and verify its checksums")
    add("--vocab", metavar="NAME_OR_FILE", help="a vocabulary (default: the shipped one that fits)")
    add("--gene-key", **_GENE_KEY)
    add("--layer", metavar="LAYER", help="layer to inspect (default: X)")
    add("--top", dest="n_top", type=int, metavar="N", help="number of missing genes to list (10)")
    command.set_defaults(run=_inspect)


def _add_quickstart(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", metavar="DIR", help="folder for the results (quickstart)")
    command.add_argument("--overwrite", action="store_true", help="replace the results of an earlier run")
    command.set_defaults(run=_quickstart)


_COMMANDS = {
    "quickstart": (_add_quickstart, "integrate and annotate bundled cells; write a UMAP and a benchmark report"),
    "train": (_add_train, "train a model from a YAML or TOML file"),
    "config": (_add_config, "write, show or check a YAML file"),
    "convert": (_add_convert, "convert data of any size to a store for training"),
    "convert-checkpoint": (_add_convert_checkpoint, "import a checkpoint of another package"),
    "embed": (_add_embed, "embed cells with a trained model; resumable"),
    "finetune": (_add_finetune, "train a copy of a model for a task, e.g. annotation"),
    "annotate": (_add_annotate, "label cells by labeled reference cells, or by a model that was trained on them"),
    "predict": (_add_predict, "predict with a fine-tuned model"),
    "evaluate": (_add_evaluate, "score a model's embedding, or the predictions of a fine-tuned one, with baselines"),
    "push": (_add_push, "upload a model to the hub"),
    "pull": (_add_pull, "download a model from the hub or a registry"),
    "soma": (_add_soma, "byte-level language models of sequences, descriptions or any file"),
    "inspect": (_add_inspect, "show the content of an h5ad file or a store, and the best vocabulary"),
}


def _parser() -> _Parser:
    parser = _Parser(prog="scforge", description="Train single-cell foundation models on AnnData.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (add, words) in _COMMANDS.items():
        add(commands.add_parser(name, help=words))
    return parser


class _ShowOnce:
    """Handler that prints each warning once, on one line, even if several steps of a command issue it."""

    def __init__(self) -> None:
        self.shown: set[str] = set()

    def __call__(self, message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        line = " ".join(str(message).split())
        if line not in self.shown:
            self.shown.add(line)
            _say(f"scforge: warning: {line}", to=sys.stderr)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments, with overrides before and after flags, which argparse does not support in a command."""
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
    """Run a command, and return 0, 2 after a user error (one line on stderr), or 130 after Ctrl-C.

    Parameters
    ----------
    argv
        Arguments after the program name. If None, uses the arguments of the process.
    """
    options = vars(_parse(argv))
    run, _ = options.pop("run"), options.pop("parser")
    # If the result is one line for another program, remarks go to stderr.
    remarks = sys.stderr if options.pop("prints_result", False) else sys.stdout
    handler = logging.StreamHandler(remarks)
    handler.setFormatter(_Printable("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("scforge").setLevel(logging.WARNING if options.get("quiet") else logging.INFO)
    with warnings.catch_warnings(), silent_loading() if options.get("quiet") else contextlib.nullcontext():
        # Warnings of libraries are for developers; those of scforge are for the user.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", category=ScforgeWarning)
        warnings.showwarning = _ShowOnce()
        token = ON_COMMAND_LINE.set(True)
        try:
            return run(**options) or 0
        except (ScforgeError, OSError) as error:
            _say(f"scforge: error: {' '.join(str(error).split())}", to=sys.stderr)
            return 2
        except KeyboardInterrupt:
            _say("scforge: interrupted", to=sys.stderr)
            return INTERRUPTED
        finally:
            ON_COMMAND_LINE.reset(token)


if __name__ == "__main__":
    sys.exit(main())

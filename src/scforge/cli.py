"""The command line: thin, and quick to start (nothing heavy is imported before a command runs)."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from scforge.cli_foreign import add_convert_checkpoint
from scforge.cli_sharing import add_pull, add_push
from scforge.cli_soma import add_soma
from scforge.cli_tasks import INTERRUPTED, add_evaluate, add_finetune, add_predict, check_places
from scforge.errors import ConfigError, OptionError, ScforgeError, ScforgeWarning

__all__ = ["main"]


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
    from scforge.estimators import train_from_config
    from scforge.estimators.config_start import first_process_speaks, training_report

    options = {"resume": arguments.resume, "overwrite": arguments.overwrite}
    speaks = first_process_speaks()
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
    from scforge.estimators import show_config

    print(show_config(config), end="")


def _config_check(arguments: argparse.Namespace) -> None:
    from scforge.config import load_config

    config = load_config(arguments.file, arguments.overrides)
    from scforge.estimators import check_config

    print(f"{arguments.file} is fine: {check_config(config)}.")


def _config_schema(arguments: argparse.Namespace) -> None:
    import json

    from scforge.config import config_schema

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
    from scforge.estimators import embed_to

    names = ("key", "batch_size", "rank", "world_size", "device", "overwrite")
    options = {name: getattr(arguments, name) for name in names}
    info = embed_to(arguments.model, arguments.source, arguments.output, **options, progress_bar=not arguments.quiet)
    if not arguments.quiet:
        print(info)


def _inspect(arguments: argparse.Namespace) -> None:
    from scforge.data import inspect_h5ad, inspect_store
    from scforge.data.store_files import may_be_store

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
    convert.add_argument("--memory", default="4GB", metavar="SIZE", help="most memory to take (%(default)s)")
    convert.add_argument("--layer", metavar="LAYER", help="layer with raw counts (default: X)")
    convert.add_argument("--gene-key", metavar="COLUMN", help="column of var with the gene names (default: var_names)")
    convert.add_argument("--modality", metavar="NAME", help="modality of an h5mu file")
    convert.add_argument("--overwrite", action="store_true", help="replace a store, or an unfinished one that differs")
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

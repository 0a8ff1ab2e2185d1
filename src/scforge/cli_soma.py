"""The commands around models of bytes: ``scforge soma train`` and ``scforge soma embed``."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_soma"]

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


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the flags that were set; defaults stand in Python."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _train(arguments: argparse.Namespace) -> None:
    from scforge.soma import train

    options = _given(arguments, (*_OF_TRAINING, *_OF_READING))
    trained = train(arguments.files, arguments.output, progress_bar=not arguments.quiet, **options)
    what = "held-out" if "validation_bits_per_byte" in trained.history else "training"
    print(f"Wrote {trained.path}: {trained.bits_per_byte:.3f} bits per byte on {what} bytes")


def _embed(arguments: argparse.Namespace) -> None:
    from scforge.soma import embed

    options = _given(arguments, (*_OF_EMBEDDING, *_OF_READING))
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
    command.set_defaults(run=_train)


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
    command.set_defaults(run=_embed)

"""The command around checkpoints of other packages: ``scforge convert-checkpoint``."""

from __future__ import annotations

import argparse

__all__ = ["add_convert_checkpoint"]

_OPTIONS = (
    *("version", "tokens_medians", "ensembl_map", "gene_names", "pooling", "embedding_layer"),
    *("vocab", "args", "cls_value", "normalize", "part"),
)
"""Flags that are options of a family, under their names in Python."""


def add_convert_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``scforge convert-checkpoint``."""
    command.add_argument("source", metavar="SOURCE", help="folder or file of the checkpoint")
    command.add_argument("-o", "--output", required=True, metavar="DIR", help="folder of the model to make")
    command.add_argument("--family", metavar="NAME", help="geneformer, scgpt, ... (default: what recognises it)")
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
    model = Encoder.from_checkpoint(arguments.source, arguments.family, **options)
    model.save(arguments.output, overwrite=arguments.overwrite)
    print(f"Wrote {arguments.output}: {model.spec.architecture}, {model.vocab}")

"""Front-class models of published checkpoints, and models written as other packages publish theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from scforge.errors import ModelFileError, OptionError, ScforgeError, first_line
from scforge.estimators.card_facts import CardFacts
from scforge.estimators.defaults import recipe_for
from scforge.estimators.front_classes import class_of_architecture
from scforge.estimators.registries import bare_registry
from scforge.estimators.saving import load_weights
from scforge.estimators.shape_check import UNUSABLE, Shapes, TooManyError, described_shapes, refuse_counts, shapes_of
from scforge.estimators.spec import ModelSpec
from scforge.foreign.base import Foreign, read_checkpoint

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scforge.estimators.base import CellModel

    type Dictionary = pd.DataFrame | str | os.PathLike[str] | Mapping[str, Any]

__all__ = ["ForeignMethods"]


class ForeignMethods:
    """What a front class adds to :class:`~scforge.estimators.base.CellModel` for checkpoints of other packages."""

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        family: str | None = None,
        *,
        adata: AnnData | None = None,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> Self:
        """Make a model of a published checkpoint.

        Every weight of the checkpoint is used, or named in the map of its family as left out and why; none of the model
        is random. The model is one like any other: it embeds, trains on, is fine-tuned and saved.

        Parameters
        ----------
        path
            Folder or file of the checkpoint.
        family
            One of :func:`scforge.foreign.list_families`; None takes the one that recognises it.
        adata
            Cells to go on with, which are set up with :meth:`setup_anndata` unless they are already. None: pass cells
            to :meth:`get_latent_representation`.
        device
            Where to put the module.
        **options
            What the family needs besides; see :meth:`from_geneformer`, :meth:`from_scgpt`, :meth:`from_scfoundation`.

        Returns
        -------
        The model, with the weights of the checkpoint.

        Raises
        ------
        MissingFileError, ModelFileError
            If the checkpoint, or what belongs to it, cannot be used.
        OptionError
            If no family recognises it, or an option cannot be used.
        GeneMismatchError
            If `adata` has too few genes of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> model = scforge.models.Encoder.from_checkpoint("Geneformer-V2-104M", adata=adata)  # doctest: +SKIP
        >>> model.get_latent_representation()  # doctest: +SKIP
        """
        return cls._of_foreign(read_checkpoint(path, family, **options), adata, device)

    @classmethod
    def from_geneformer(
        cls,
        path: str | os.PathLike[str],
        *,
        tokens_medians: pd.DataFrame | str | os.PathLike[str] | Sequence[Any] | None = None,
        version: str | None = None,
        ensembl_map: Dictionary | None = None,
        gene_names: Dictionary | None = None,
        pooling: str | None = None,
        embedding_layer: int | None = None,
        adata: AnnData | None = None,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Make a model of a published Geneformer.

        Parameters
        ----------
        path
            Folder with ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin``.
        tokens_medians
            The published dictionaries: the folder of their pickle files, of which nothing but text and numbers is
            unpickled; or two files or dictionaries, gene to token and gene to median, as a tuple; or a table as
            :meth:`scforge.tokenizers.RankValueTokenizer.from_geneformer` takes it. None looks for them in `path`.
        version
            ``"V1"`` (2,048 genes) or ``"V2"`` (4,096 tokens with CLS and EOS); None goes by the number of positions and
            tokens.
        ensembl_map
            Former Ensembl ids to current ones: a dictionary, its file, or a table with ``ensembl_id`` and ``gene_id``.
        gene_names
            Symbols to Ensembl ids, so that cells may have symbols: a dictionary, its file, or a table with ``symbol``
            and ``gene_id``.
        pooling
            ``"genes"``: the mean over genes, as Geneformer's own code embeds cells with V1; ``"cls"``, as it does with
            V2; ``"mean"``: over all tokens, CLS and EOS included. None goes by the version.
        embedding_layer
            Take the embedding from so many layers below the last; None takes 1, as Geneformer's own code. Pass 0 for
            fine-tuning, so that the last layer has a use.
        adata, device
            See :meth:`from_checkpoint`.

        Returns
        -------
        The model, with the weights of the checkpoint.

        Raises
        ------
        MissingFileError, ModelFileError, DataError, OptionError, GeneMismatchError
            See :meth:`from_checkpoint`.

        Examples
        --------
        >>> import scforge
        >>> model = scforge.models.Encoder.from_geneformer("Geneformer-V2-104M")  # doctest: +SKIP
        >>> model.get_latent_representation(adata)  # doctest: +SKIP
        """
        options = {
            "tokens_medians": tokens_medians,
            "version": version,
            "ensembl_map": ensembl_map,
            "gene_names": gene_names,
            "pooling": pooling,
            "embedding_layer": embedding_layer,
        }
        return cls.from_checkpoint(path, "geneformer", adata=adata, device=device, **options)

    @classmethod
    def from_scgpt(
        cls,
        path: str | os.PathLike[str],
        *,
        vocab: str | os.PathLike[str] | Mapping[str, int] | None = None,
        args: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        cls_value: float | None = None,
        normalize: bool = False,
        adata: AnnData | None = None,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Make a model of a published scGPT.

        Parameters
        ----------
        path
            Folder with ``best_model.pt``, ``vocab.json`` and ``args.json``, or the file of the weights, which may have
            the names that flash attention gives them.
        vocab
            Gene symbol to token id: a JSON file or a dictionary; None takes ``vocab.json`` beside the weights.
        args
            Options of the training: a JSON file or a dictionary; None takes ``args.json`` beside the weights.
        cls_value
            Value of the CLS token. None takes ``pad_value`` of `args`, as scGPT does in its pretraining and to embed
            cells; 0 is what its fine-tuning scripts take.
        normalize
            Divide each embedding by its length, as scGPT's ``embed_data`` does. Cosines are the same either way.
        adata, device
            See :meth:`from_checkpoint`.

        Returns
        -------
        The model, with the weights of the checkpoint.

        Raises
        ------
        MissingFileError, ModelFileError, DataError, OptionError, GeneMismatchError
            See :meth:`from_checkpoint`.

        Examples
        --------
        >>> import scforge
        >>> model = scforge.models.Encoder.from_scgpt("scGPT_human", adata=adata)  # doctest: +SKIP
        >>> model.get_latent_representation()  # doctest: +SKIP

        Notes
        -----
        The embedding is the state of CLS.
        """
        options = {"vocab": vocab, "args": args, "cls_value": cls_value, "normalize": normalize}
        return cls.from_checkpoint(path, "scgpt", adata=adata, device=device, **options)

    @classmethod
    def from_scfoundation(
        cls,
        path: str | os.PathLike[str],
        *,
        vocab: str | os.PathLike[str] | Sequence[str] | None = None,
        part: str = "cell",
        pooling: str = "depths",
        adata: AnnData | None = None,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Make a model of the encoder of a published scFoundation, with its embedding of genes and values.

        The decoder, a Performer that predicts all genes of the panel, is left out, so the model embeds cells and can be
        fine-tuned, but does not predict expression.

        Parameters
        ----------
        path
            The file ``models.ckpt``, or its folder.
        vocab
            The panel of genes: the published table with ``gene_name`` and ``index``, or the names in order; None takes
            the table beside the weights.
        part
            Which of the models in the file: ``"cell"``, ``"gene"`` or ``"rde"``.
        pooling
            ``"depths"``: the states of the two tokens of depth, and the largest and the mean over genes, next to each
            other, as scFoundation embeds cells; or another of ``transformer_encoder``.
        adata, device
            See :meth:`from_checkpoint`.

        Returns
        -------
        The model, with the weights of the checkpoint.

        Raises
        ------
        MissingFileError, ModelFileError, DataError, OptionError, GeneMismatchError
            See :meth:`from_checkpoint`.

        Examples
        --------
        >>> import scforge
        >>> model = scforge.models.Encoder.from_scfoundation("models.ckpt", adata=adata)  # doctest: +SKIP
        >>> model.get_latent_representation()  # doctest: +SKIP
        """
        options = {"vocab": vocab, "part": part, "pooling": pooling}
        return cls.from_checkpoint(path, "scfoundation", adata=adata, device=device, **options)

    def export_to_transformers(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the model as a folder that ``transformers.BertForMaskedLM.from_pretrained`` loads.

        See :func:`scforge.foreign.to_geneformer`.

        Parameters
        ----------
        path
            Folder to make.
        overwrite
            Replace the model in a folder that exists; files that are not of scforge stay.

        Raises
        ------
        OptionError
            If the model has something that BERT has not, or `path` exists.

        Examples
        --------
        >>> import os, scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> options = {"position_embedding": "learned", "norm_first": False, "use_expression_values": False}
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2}
        >>> model = scforge.models.Encoder(adata, "transformer_encoder", **options, **sizes)
        >>> model.export_to_transformers("as_geneformer", overwrite=True)
        >>> sorted(os.listdir("as_geneformer"))
        ['config.json', 'gene_median_dictionary.pkl', 'model.safetensors', 'token_dictionary.pkl']
        """
        from scforge.foreign.geneformer import to_geneformer

        to_geneformer(cast("CellModel", self), path, overwrite=overwrite)

    @classmethod
    def _of_foreign(cls, found: Foreign, adata: AnnData | None, device: str | torch.device) -> Self:
        """Make a model of a checkpoint that was read, of the front class that goes with its architecture."""
        special = class_of_architecture(found.architecture["name"])
        kind = cast("type[CellModel]", special if issubclass(special, cls) else cls)
        setup = {"layer": None, "gene_key": None, "batch_key": None, "labels_key": None}
        registry = None
        if adata is None:
            registry = bare_registry(kind.__name__, setup)
        elif kind._setup_of(adata) is None:
            kind.setup_anndata(adata)
        parts = {"architecture": found.architecture, "tokenizer": found.tokenizer, "objective": found.objective}
        # Before memory is taken for a module of the size that a config claims.
        expected = _expected_of(found)
        weights = None if expected is None else found.weights(expected)
        model = kind._of_parts(parts, found.vocab, adata=adata, registry=registry, seed=0)
        if weights is None:
            weights = found.weights(shapes_of(model.module))
        load_weights(model.module, weights, source=found.source)
        try:
            model.to_device(device)
        except (AssertionError, RuntimeError) as error:
            raise OptionError(f"device={str(device)!r} cannot be used: {first_line(error)}") from error
        model.is_trained_ = True  # elsewhere
        model._facts = CardFacts.of_checkpoint(found)
        return cast("Self", model)


def _expected_of(found: Foreign) -> Shapes | None:
    """Return the shapes of the weights that a checkpoint's config asks for; see :func:`described_shapes`.

    Raises
    ------
    ModelFileError
        If it describes no model that can be made, or one of far more parts than the checkpoint has weights.
    """
    architecture, tokenizer, objective = (dict(part) for part in (found.architecture, found.tokenizer, found.objective))
    name, *others = (part.pop("name") for part in (architecture, tokenizer, objective))
    refuse_counts({**architecture, **tokenizer}, {name: tuple(value.shape) for name, value in found.tensors.items()})
    spec, _ = ModelSpec.resolve(
        recipe_for(name, architecture),
        found.vocab,
        tokenizer=(others[0], tokenizer),
        objective=(others[1], objective),
        options=architecture,
    )
    try:
        return described_shapes(spec, len(found.tensors))
    except TooManyError:
        raise ModelFileError(
            f"the config of {found.source!r} describes a model of far more parts than the {len(found.tensors):,} "
            "weights that are there; give the config that belongs to the checkpoint."
        ) from None
    except ScforgeError:
        raise
    except UNUSABLE as error:
        raise ModelFileError(
            f"the config of {found.source!r} describes no model that can be made: {first_line(error)}."
        ) from error

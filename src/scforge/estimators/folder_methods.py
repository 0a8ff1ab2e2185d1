"""What every front class does with folders: save, load, export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from scforge._io import read_settled
from scforge.data.checks import check_adata, inherited_batch_key
from scforge.errors import ModelFileError, OptionError, first_line
from scforge.estimators.card_facts import CardFacts, Origin
from scforge.estimators.front_classes import class_in_place_of
from scforge.estimators.model_content import card_of, content_of
from scforge.estimators.registries import bare_registry
from scforge.estimators.saving import load_weights, read_adata, read_folder, write_folder
from scforge.estimators.sharing import load_found
from scforge.estimators.tuning import Tuning
from scforge.finetuning.held_out import SeenCells
from scforge.hub.finding import find_model, is_registry_name, origin_of

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scforge.data.vocab import GeneVocab

__all__ = ["FolderMethods"]


class FolderMethods:
    """Methods around folders."""

    _facts: CardFacts = CardFacts()
    _origin: Origin | None = None

    def save(
        self: Any,
        dir_path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        save_anndata: bool = False,
        scvi_format: bool = False,
        prefix: str | None = None,
    ) -> None:
        """Save the model to a folder: weights (safetensors), description (JSON), vocabulary (JSON), model card.

        Parameters
        ----------
        dir_path
            Folder to make. It appears whole or not at all.
        overwrite
            Replace the model in a folder that exists; files that are not of scforge stay.
        save_anndata
            Also write the training data, as ``adata.h5ad``, which :meth:`load` reads again.
        scvi_format
            Also write what ``scvi.hub.HubModel`` needs: ``model.pt``, which holds the weights a second time, and
            ``_scvi_required_metadata.json``. :meth:`load` reads neither. scvi-tools unpickles such files without a
            check, so open only folders of people you trust with it.
        prefix
            Not supported: a folder holds one model, so give each a folder of its own.

        Examples
        --------
        >>> import os, scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> model.save("light", overwrite=True)
        >>> sorted(os.listdir("light"))
        ['README.md', 'config.json', 'model.safetensors', 'vocab.json']
        """
        _check_prefix(dir_path, prefix)
        if save_anndata and self.adata is None:
            raise OptionError("save_anndata=True but the model was loaded without adata.")

        def extra(folder: Path) -> None:
            if scvi_format:
                from scforge.estimators.scvi_hub import write_scvi_files

                write_scvi_files(self, folder)

        self._write(dir_path, overwrite=overwrite, adata=self.adata if save_anndata else None, extra=extra)
        self._origin = Origin.at(self, dir_path)

    def _write(
        self: Any,
        dir_path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        adata: AnnData | None = None,
        extra: Any = None,
        weights: dict[str, torch.Tensor] | None = None,
        card: str | None = None,
    ) -> None:
        """Write a model folder with these weights, or those of the module, and this card, or the usual one."""
        write_folder(
            dir_path,
            module=self.module,
            vocab=self._spec.vocab,
            content=content_of(self),
            seen=self._seen,
            card=card_of(self) if card is None else card,
            overwrite=overwrite,
            adata=adata,
            extra=extra,
            weights=weights,
        )

    @classmethod
    def load(
        cls,
        dir_path: str | os.PathLike[str],
        adata: AnnData | Literal[False] | None = None,
        *,
        device: str | torch.device = "cpu",
        accelerator: str | None = None,
        prefix: str | None = None,
    ) -> Self:
        """Load a model that :meth:`save` wrote, with this scforge or an earlier one.

        Nothing in the folder is run, and no pickle in it is opened.

        Parameters
        ----------
        dir_path
            The folder; or ``"scforge://name"``, a model of the registry. :meth:`Encoder.from_pretrained` also takes a
            repository of the hub.
        adata
            Data to go on with; unless it is set up already, it is set up as the training data were, without the columns
            of obs that it lacks. None takes the training data, if they were saved with the model; False takes none:
            pass the cells to :meth:`get_latent_representation`.
        device
            Where to put the module.
        accelerator
            The same in the words of scvi-tools: ``"cpu"``, ``"gpu"``, ``"mps"`` or ``"auto"``; `device` is left out
            then, or the number of the GPU.
        prefix
            Not supported, see :meth:`save`.

        Returns
        -------
        The model.

        Raises
        ------
        MissingFileError, ModelFileError
            If the folder, or what is in it, cannot be used.
        GeneMismatchError
            If `adata` has too few genes of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> model.save("light", overwrite=True)
        >>> again = scforge.models.Encoder.load("light", adata)
        >>> bool((again.get_latent_representation() == model.get_latent_representation()).all())
        True
        """
        _check_prefix(dir_path, prefix)
        if accelerator is not None:
            device = _device_of(accelerator, device)
        if is_registry_name(dir_path):
            said = f"dir_path={dir_path!r}"
            return cast("Self", load_found(cls, find_model(dir_path, said=said), said, adata, device=device))

        def read() -> Any:
            config, vocab, weights = read_folder(dir_path)
            cells = read_adata(dir_path, config) if adata is None else None if adata is False else adata
            return cls._of_folder(dir_path, config, vocab, weights, adata=cells, device=device)

        return read_settled(dir_path, read)

    @staticmethod
    def load_registry(dir_path: str | os.PathLike[str], prefix: str | None = None) -> dict[str, Any]:
        """Return the registry of a saved model, as scvi-tools has it: which class it is and how it was set up.

        Parameters
        ----------
        dir_path
            The folder.
        prefix
            Not supported, see :meth:`save`.

        Returns
        -------
        The registry, without the fields of an AnnData.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> scforge.models.Encoder(adata, hidden_dim=8).save("light", overwrite=True)
        >>> registry = scforge.models.Encoder.load_registry("light")
        >>> registry["model_name"], registry["setup_args"]["labels_key"]
        ('Encoder', 'cell_type')
        """
        _check_prefix(dir_path, prefix)
        config, _, _ = read_folder(dir_path)
        return bare_registry(config["class"], config["setup"])

    @classmethod
    def _of_folder(
        cls: Any,
        dir_path: str | os.PathLike[str],
        config: Mapping[str, Any],
        vocab: GeneVocab,
        weights: dict[str, torch.Tensor],
        *,
        adata: AnnData | None,
        device: str | torch.device,
    ) -> Any:
        """Make the model of what was read from a folder."""
        made_by = config["class"]
        found = class_in_place_of(cls, made_by, config["architecture"]["name"])
        if found is None:
            raise ModelFileError(
                f"dir_path={str(dir_path)!r} holds a model of the class {made_by!r}; "
                f"load it with scforge.models.{made_by}.load."
            )
        cls = found
        setup = config["setup"]
        registry = bare_registry(cls.__name__, setup) if adata is None else None
        if adata is not None:
            adata = cls._set_up_as(adata, setup)
            check_adata(adata)
            if cls._setup_of(adata) is None:
                labels = setup["labels_key"]
                present = {
                    "batch_key": inherited_batch_key(adata.obs, setup["batch_key"]),
                    "labels_key": labels if labels in adata.obs else None,
                }
                own = {key: value for key, value in setup.items() if key != "modality"}
                cls.setup_anndata(adata, **(own | present))
        tuning = Tuning.from_json(config.get("tuning"), source=str(dir_path))
        model = cls._of_parts(config, vocab, adata=adata, registry=registry, seed=config["seed"], tuning=tuning)
        load_weights(model.module, weights, source=str(dir_path))
        try:
            model.to_device(device)
        except (AssertionError, RuntimeError) as error:
            raise OptionError(f"device={str(device)!r} cannot be used: {first_line(error)}") from error
        model._seen = None if tuning is None else SeenCells.load(dir_path, tuning.split.get("cells"))
        model.is_trained_ = config["is_trained"]
        model._extend_history(config["history"])
        model.n_epochs_ = config["n_epochs"]
        model._facts = CardFacts.from_json(config.get("card"), source=str(dir_path))
        name, revision = origin_of(Path(dir_path))
        model._origin = replace(Origin.at(model, dir_path), name=name, revision=revision)
        return model

    @classmethod
    def _of_parts(cls: Any, parts: Mapping[str, Any], vocab: GeneVocab, **options: Any) -> Any:
        """Make a model of what :meth:`ModelSpec.to_json` says, with random weights."""
        architecture = dict(parts["architecture"])
        names = architecture.pop("name"), parts["tokenizer"], parts["objective"]
        adata = options.pop("adata", None)
        return cls(adata, *names, vocab=vocab, n_top_genes=0, **options, **architecture)

    def export(
        self: Any,
        path: str | os.PathLike[str],
        format: str = "onnx",
        *,
        max_len: int | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the computation of the cell embedding, for programs that have neither scforge nor, with ONNX, PyTorch.

        The folder holds ``model.onnx`` (or ``model.pt2``), ``vocab.json``, and ``export.json`` with the tokenizer, the
        inputs and the hash of the vocabulary. Any number of cells and of tokens can be given to the exported model. It
        is compared with :meth:`get_latent_representation`'s own computation before the folder appears.

        Parameters
        ----------
        path
            Folder to make. It appears whole or not at all.
        format
            ``"onnx"``, or ``"torch"`` for :func:`torch.export.load`.
        max_len
            Most tokens of a cell that can be given; None takes what the model was made for.
        overwrite
            Replace the model in a folder that exists; files that are not of scforge stay.

        Raises
        ------
        OptionError
            If an argument cannot be used, a package is missing, or the architecture cannot be exported.
        ModelFileError
            If the exported model computes other embeddings, in which case nothing is written.

        Examples
        --------
        >>> import os, scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> model.export("exported", "torch", overwrite=True)
        >>> sorted(os.listdir("exported"))
        ['export.json', 'model.pt2', 'vocab.json']
        """
        from scforge.estimators.exporting import export_model

        export_model(self, path, format, max_len=max_len, overwrite=overwrite)


def _check_prefix(dir_path: str | os.PathLike[str], prefix: str | None) -> None:
    if prefix is not None:
        own = Path(dir_path) / str(prefix).strip("_-. ")
        raise OptionError(f"prefix={prefix!r}, but a folder holds one model; pass dir_path={str(own)!r} in its place.")


def _device_of(accelerator: str, device: Any) -> Any:
    """Return the device that scvi-tools' `accelerator` and `device` name."""
    import torch

    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    kinds = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
    if accelerator not in kinds:
        raise OptionError(f"accelerator={accelerator!r} is not known (known: 'auto', {', '.join(map(repr, kinds))}).")
    return f"{kinds[accelerator]}:{device}" if isinstance(device, int) and accelerator != "cpu" else kinds[accelerator]

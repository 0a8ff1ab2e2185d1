"""The commands around the hub: ``scforge push`` and ``scforge pull``."""

from __future__ import annotations

import argparse

__all__ = ["add_pull", "add_push"]

_OF_CARD = ("licence", "data", "citation", "metrics")
_OF_REPO = ("private", "revision", "commit_message", "create_pr")


def _push(arguments: argparse.Namespace) -> None:
    from scforge.estimators.sharing_files import push_folder

    names = (*_OF_REPO, *_OF_CARD, "base")
    print(push_folder(arguments.folder, arguments.repo_id, **{name: getattr(arguments, name) for name in names}))


def _pull(arguments: argparse.Namespace) -> None:
    from scforge.estimators.sharing_files import pull_folder

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
    command.add_argument("--licence", metavar="NAME", help="for the card, e.g. apache-2.0")
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

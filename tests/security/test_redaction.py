"""No part of a URL that may be a credential is shown, whatever characters it contains."""

import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scforge.data.paths import stem_of
from scforge.errors import DataError, ScforgeWarning, redacted, safe_cause
from scforge.eval.base import Evaluation, resolve
from scforge.workflows.places import finetuning_config

SCHEMES = ["http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "filecache::https", "HTTPS"]
# Quotes and backslashes are shown by repr in several ways, which a substring does not find.
SECRETS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_characters="'\"\\"), min_size=6).filter(
    lambda text: text.isprintable() and not text.isspace() and "@" not in text and "://" not in text
)


def shows(secret: str, text: str) -> bool:
    return secret.strip() in text


@given(st.sampled_from(SCHEMES), SECRETS)
@example("https", "pa/ss word")
@example("https", "pa#ss?word")
@example("s3", "123/abc:d")
@example("https", "8080/secret")
def test_passwords(scheme: str, secret: str) -> None:
    url = f"{scheme}://me:{secret}@host/cells.h5ad"
    for text in (repr(url), f"{url!r} cannot be read: no route.", f"url={url!r}, 'other'"):
        assert not shows(secret, redacted(text)), redacted(text)
        assert "host/cells.h5ad" in redacted(text)
    assert not shows(secret, str(DataError(f"{url!r} is missing.")))
    assert not shows(secret, str(ScforgeWarning(f"{url!r} is missing.")))


@given(st.sampled_from(SCHEMES), SECRETS.filter(lambda text: not any(c.isspace() for c in text)))
@example("https", "pa/ss#word")
def test_passwords_without_quotes_around_the_url(scheme: str, secret: str) -> None:
    text = redacted(f"could not open {scheme}://me:{secret}@host/x after 3 tries")
    assert not shows(secret, text)
    assert text.endswith("host/x after 3 tries")


@example("filecache::https", "00000<SECRET", "sig", "?")
@given(st.sampled_from(SCHEMES), SECRETS, st.sampled_from(["sig", "token", "X-Amz-Signature"]), st.sampled_from("?#"))
def test_queries_and_fragments(scheme: str, secret: str, name: str, mark: str) -> None:
    text = redacted(f"{f'{scheme}://host/cells.h5ad{mark}{name}={secret}'!r} cannot be read.")
    assert not shows(secret, text)
    assert text == f"'{scheme}://host/cells.h5ad{mark}***' cannot be read."


@given(st.sampled_from(SCHEMES[:-2]), SECRETS, SECRETS)
@example("https", "pa/ss#word", "SECRET.a/SECRETb&x=c")
def test_names_of_urls(scheme: str, password: str, query: str) -> None:
    assert stem_of(f"{scheme}://me:{password}@host/folder/cells.h5ad?sig={query}#{query}") == "cells"
    assert stem_of(f"{scheme}://me:{password}@host") == "host"


@pytest.mark.parametrize("end", ["?sig=SECRET.a/SECRET", "?sig=SECRET.h5ad", "?sig=SECRET.a#SECRET", "#SECRET/b"])
def test_the_folder_of_fine_tuning_has_no_query(end: str) -> None:
    flags = {
        "--base-model": ("finetune.base_model", "model"),
        "--data": ("data.paths", [f"http://me:PASSWORD@127.0.0.1:9/cells.h5ad{end}"]),
        "--task": ("finetune.task", "annotation"),
        "--labels-key": ("data.labels_key", "type"),
    }
    assert finetuning_config(None, [], flags=flags).output.checkpoint_dir == "cells_annotation"


def test_the_name_of_an_evaluation_has_no_query() -> None:
    url = "http://me:PASSWORD@127.0.0.1:9/cells.h5ad?sig=SECRET.a/SECRET"
    found = resolve([Evaluation("geometry"), Evaluation("geometry", dataset=url)], {})
    assert [one.name for one in found] == ["geometry_held_out", "geometry_cells"]


@given(st.text(max_size=60))
def test_redacting_twice_changes_nothing(text: str) -> None:
    assert redacted(redacted(text)) == redacted(text)


@pytest.mark.parametrize("scheme", SCHEMES[:-1])
@pytest.mark.parametrize("end", ["", ":8080", ":8080/a/b.zarr", "/a b/c.h5ad", "/cells_?.h5ad", "/[ab]*.h5ad"])
def test_what_is_no_credential_stays(scheme: str, end: str) -> None:
    if scheme.endswith(("http", "https")) and "?" in end:
        return  # a query
    url = f"{scheme}://host{end}"
    assert redacted(f"{url!r} cannot be read.") == f"{url!r} cannot be read."


@pytest.mark.parametrize("text", ["hf://org/light@v1", "'hf://org/light@v1' is old", "C:/a@b", "me@host: x", "a: b@c"])
def test_names_with_a_version_stay(text: str) -> None:
    assert redacted(text) == text


def test_a_password_with_spaces_in_a_message_of_another_library() -> None:
    assert "word" not in redacted("Cannot connect to https://me:pass word/x#1@host/x [refused]")
    assert redacted("https://host:80 is down, ask a@b") == "https://host:80 is down, ask a@b"


def test_a_cause_with_a_credential_is_dropped() -> None:
    error = OSError("no route to 'az://box/x?sig=hunter2'")
    assert safe_cause(error) is None
    with pytest.raises(DataError) as caught:
        raise DataError(f"cannot be read: {error}") from safe_cause(error)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))

from collections.abc import Callable
from pathlib import Path

import pytest

from lanewise import config
from lanewise.data.prepare import prepare


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., config.Data]:
    """Data settings with a cache of the test's own; bytes as tokens, for their speed, unless said otherwise."""

    def make(source: Path | str, **changes) -> config.Data:
        return config.Data(**{"source": str(source), "cache": str(tmp_path / "cache"), "tokenizer": "bytes", **changes})

    return make


@pytest.fixture
def built(settings) -> Callable[..., Path]:
    """The token folder of a source."""

    def make(source: Path | str, **changes) -> Path:
        return prepare(settings(source, **changes))

    return make

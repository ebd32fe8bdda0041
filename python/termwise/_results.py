"""What was found, for programs and for people."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Result(Mapping[str, Any]):
    """What was found: a mapping for programs, a page for people.

    A notebook shows the page with its figures, a terminal its tables. Values are reached by key, or by a dotted path, which goes through lists
    as well: ``result.to_numpy("layers.heads.entropy.nats")`` is an array [layers, heads].

    >>> import termwise
    >>> found = termwise.separation(networks="softmax", n=100, draws=50)
    >>> found.kind, found["points"][0]["n"]
    ('separation', 100)
    >>> found.to_numpy("points.n")
    array([100.])
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._values: dict[str, Any] = json.loads(core.json())

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.to_json(),)

    @property
    def kind(self) -> str:
        """What it is, in one word."""
        return self._core.kind

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def to_dict(self) -> dict[str, Any]:
        """All of it, as ``termwise show`` reads it again; numbers that are not finite are None."""
        return json.loads(self._core.json())

    def to_json(self) -> str:
        """The same as text."""
        return self._core.json()

    def to_numpy(self, path: str) -> NDArray[np.float64]:
        """The numbers at a dotted path, lists becoming dimensions; what is absent is NaN."""
        found = _at(self._values, path.split("."), path)
        try:
            return np.array(_numbers(found), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path!r} of this {self.kind} is no array of numbers: {error}") from None

    def figures(self) -> dict[str, str]:
        """SVG of all figures, by name."""
        return dict(self._core.figures())

    def to_html(self) -> str:
        """One page that needs nothing else."""
        return self._core.html()

    def to_markdown(self) -> str:
        """Texts and tables."""
        return self._core.markdown()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the JSON, the page, and every figure and table on its own; gives the path of the page."""
        return Path(self._core.write(os.fspath(folder)))

    def __repr__(self) -> str:
        return self._core.text(100).rstrip("\n")

    def _repr_html_(self) -> str:
        # The page has styles of its own, which a frame keeps apart from those of the notebook.
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 1px solid #8884" loading="lazy"></iframe>'


def _again(text: str) -> Result:
    """The result of a JSON that :meth:`Result.to_json` gave."""
    return Result(_core.Found.of_json(text))


def _at(value: Any, path: list[str], whole: str) -> Any:
    if not path:
        return value
    if isinstance(value, list):
        return [_at(item, path, whole) for item in value]
    if isinstance(value, dict):
        if path[0] not in value:
            raise KeyError(f"{whole!r}: there is no {path[0]!r} among {', '.join(value)}")
        return _at(value[path[0]], path[1:], whole)
    raise KeyError(f"{whole!r}: {path[0]!r} is asked of {value!r}")


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return np.nan if value is None else value

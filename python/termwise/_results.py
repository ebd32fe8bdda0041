"""Results of analyses, trainings and experiments."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Result(Mapping[str, Any]):
    """A result: a mapping with attribute access, and a report with figures.

    A notebook shows the HTML report, a terminal its tables. Values are accessed by key or attribute. A dotted path reaches through lists:
    ``result.to_numpy("layers.heads.entropy.nats")`` is an array [layers, heads].

    Examples
    --------
    >>> import termwise
    >>> result = termwise.separation(networks="softmax", n=100, draws=50)
    >>> result.kind, result["points"][0]["n"], len(result.points)
    ('separation', 100, 1)
    >>> result.to_numpy("points.n")
    array([100.])
    """

    def __init__(self, core: _core.Found) -> None:
        self._core = core
        self._values: dict[str, Any] = json.loads(core.json())

    def __reduce__(self) -> tuple[Any, ...]:
        return _result_of_json, (self.to_json(),)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its keys are {', '.join(values)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    @property
    def kind(self) -> str:
        """Kind of result, such as ``"spectrum"``."""
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
        """All values as a dict. Numbers that are not finite are None."""
        values: dict[str, Any] = json.loads(self._core.json())
        return values

    def to_json(self) -> str:
        """JSON, which ``termwise report`` renders."""
        return self._core.json()

    def to_numpy(self, path: str) -> NDArray[np.float64]:
        """The numbers at a dotted path. Lists become dimensions; missing numbers are NaN."""
        found = _at(self._values, path.split("."), path)
        try:
            return np.array(_numbers(found), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"{path!r} of this {self.kind} is not an array of numbers: {error}") from None

    def to_pandas(self, path: str | None = None) -> Any:
        """Return a pandas DataFrame of the list of records at a dotted path, such as ``result.to_pandas("points")``.

        Nested records become dotted columns. Default path: the first list of records that is not empty.
        """
        import pandas

        lists = [key for key, value in self._values.items() if value and _is_records(value)]
        if path is None and not lists:
            raise InputError(f"this {self.kind} has no list of records: give a path")
        path = lists[0] if path is None else path
        found = _at(self._values, path.split("."), path)
        if not _is_records(found):
            raise InputError(f"{path!r} of this {self.kind} is not a list of records; lists of records are {', '.join(lists) or 'nested: give a dotted path'}")
        return pandas.json_normalize(found)

    def figures(self) -> dict[str, str]:
        """All figures as SVG, by name."""
        return dict(self._core.figures())

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        return self._core.html()

    def to_markdown(self) -> str:
        """Text and tables of the report as Markdown."""
        return self._core.markdown()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write JSON, the HTML report, and every figure and table into a folder. Returns the path of the report."""
        return Path(self._core.write(os.fspath(folder)))

    def __repr__(self) -> str:
        return self._core.text(100).rstrip("\n")

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        # A frame isolates the styles of the report from those of the notebook. It grows with its content, up to three quarters of the screen.
        page = html.escape(self.to_html(), quote=True)
        resize = "this.style.height = Math.min(this.contentDocument.documentElement.scrollHeight + 2, 0.75 * screen.height) + 'px'"
        style = "width: 100%; height: 20em; border: 1px solid #8884; box-sizing: border-box"
        return f'<iframe srcdoc="{page}" style="{style}" onload="{resize}"></iframe>'


def _result_of_json(text: str) -> Result:
    """Rebuild a result from the JSON of :meth:`Result.to_json`."""
    return Result(_core.Found.of_json(text))


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _at(value: Any, path: list[str], whole: str) -> Any:
    if not path:
        return value
    if isinstance(value, list):
        return [_at(item, path, whole) for item in value]
    if isinstance(value, dict):
        if path[0] not in value:
            raise KeyError(f"{whole!r}: there is no {path[0]!r} among {', '.join(value)}")
        return _at(value[path[0]], path[1:], whole)
    raise KeyError(f"{whole!r}: {value!r} has no {path[0]!r}")


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return np.nan if value is None else value

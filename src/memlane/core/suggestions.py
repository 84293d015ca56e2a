"""Suggestions: the known name that is nearest to an unknown one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def did_you_mean(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The end of an error message about an unknown name: a suggestion, or "" if no known name is similar.

    ``synonyms`` maps names from other libraries to names in ``known``. They are preferred to similar names.

        >>> did_you_mean("gama", ["gamma", "tau"])
        "; did you mean 'gamma'?"
        >>> did_you_mean("n_steps", ["num_steps", "tau"], {"n_steps": "num_steps"})
        "; did you mean 'num_steps'?"
        >>> did_you_mean("colour", ["gamma", "tau"])
        ''
    """
    names = list(known)
    suggestion = (synonyms or {}).get(name)
    if suggestion not in names:
        by_lower_case = {known_name.lower(): known_name for known_name in names}
        matches = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
        suggestion = by_lower_case[matches[0]] if matches else None
    return f"; did you mean {suggestion!r}?" if suggestion is not None else ""

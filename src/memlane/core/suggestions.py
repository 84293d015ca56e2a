"""Suggestions: the nearest known name for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def did_you_mean(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """A half sentence to append to an error about an unknown name; empty if nothing known is near.

    ``synonyms`` maps names that users of other libraries type to names that are known here.

        >>> did_you_mean("gama", ["gamma", "tau"])
        "; did you mean 'gamma'?"
        >>> did_you_mean("n_steps", ["num_steps", "tau"], {"n_steps": "num_steps"})
        "; did you mean 'num_steps'?"
        >>> did_you_mean("colour", ["gamma", "tau"])
        ''
    """
    names = list(known)
    exact = (synonyms or {}).get(name)
    by_lower_case = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    found = exact if exact in names else by_lower_case[near[0]] if near else None
    return f"; did you mean {found!r}?" if found is not None else ""

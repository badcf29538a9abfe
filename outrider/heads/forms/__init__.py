"""One file for each form of a head; `FORMS` is the list of them."""

from __future__ import annotations

from outrider.heads.form import HeadForm

FORMS: tuple[HeadForm, ...] = ()

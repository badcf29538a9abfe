"""One file for each form of a head; `FORMS` is the list of them."""

from __future__ import annotations

from outrider.heads.form import HeadForm
from outrider.heads.forms import medusa, mlp_speculator

FORMS: tuple[HeadForm, ...] = (medusa.FORM, mlp_speculator.FORM)

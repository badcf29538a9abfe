"""One file for each form of a head; `FORMS` is the list of them, in the order in which a configuration is tried."""

from __future__ import annotations

from outrider.heads.form import HeadForm
from outrider.heads.forms import dflash, eagle, eagle3, medusa, mlp_speculator, mtp, peagle

FORMS: tuple[HeadForm, ...] = (
    *(eagle3.FORM, peagle.FORM, dflash.FORM, medusa.FORM, mlp_speculator.FORM, mtp.FORM),
    eagle.FORM,  # its configuration says little
)

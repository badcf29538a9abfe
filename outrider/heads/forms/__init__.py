"""The forms of heads, one file each."""

from __future__ import annotations

from outrider.heads.base import HeadModel
from outrider.heads.forms.dflash import DFlash
from outrider.heads.forms.dflash2 import DFlash2
from outrider.heads.forms.dspark import DSpark
from outrider.heads.forms.eagle import Eagle
from outrider.heads.forms.eagle3 import Eagle3
from outrider.heads.forms.medusa import Medusa
from outrider.heads.forms.mlp_speculator import MLPSpeculator
from outrider.heads.forms.mtp import MTP
from outrider.heads.forms.peagle import PEagle

FORMS: tuple[type[HeadModel], ...] = (Eagle3, PEagle, DFlash, DFlash2, DSpark, Medusa, MLPSpeculator, MTP, Eagle)
"""All forms, in the order in which they are tried. EAGLE is last, because its configuration may name no form."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from outrider.engine.forward_phases import ModulePhases


class PlainNorm(nn.Module):
    def forward(self, rows):
        return rows / rows.norm()


class SelfAttention(nn.Module):
    def __init__(self, on_layer_done=lambda: None):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.on_layer_done = on_layer_done

    def forward(self, rows):
        rows = self.q_proj(rows)
        self.on_layer_done()
        return self.o_proj(rows)


def model(**options):
    return nn.Sequential(PlainNorm(), SelfAttention(**options), nn.ReLU())


def ticking():
    """A clock that moves on by one at each reading."""
    return itertools.count().__next__


def test_a_module_counts_without_the_measured_ones_inside_it():
    net = model()
    phases = ModulePhases(net, now=ticking())
    phases.start()
    net(torch.ones(2, 4))
    # Readings: norm 0 1, attention 2 [q 3 4] [o 5 6] 7.
    assert phases.take() == {"norm": 1, "linear": 2, "attention": 3}
    assert phases.take() == {}


def test_what_a_callback_takes_is_of_no_phase():
    net = model(on_layer_done=lambda: phases.exclude(2))
    phases = ModulePhases(net, now=ticking())
    phases.start()
    net(torch.ones(2, 4))
    assert phases.take() == {"norm": 1, "linear": 2, "attention": 1}


def test_hooks_are_there_only_while_measuring():
    net = model()
    phases = ModulePhases(net)
    phases.start()
    phases.stop()
    phases.stop()
    net(torch.ones(2, 4))
    assert phases.take() == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())

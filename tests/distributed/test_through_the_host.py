"""`replicate` on XLA devices over gloo, with real processes: gradients pass through the host."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.lane("xla"), pytest.mark.timeout(400)]

CASES = [
    "torch_does_not_reduce_xla_over_gloo",
    "trains_as_one_process",
    "starts_from_rank_0_and_follows_its_buffers",
    "lazy_module",
    "accumulates_without_sync",
    "ranks_use_different_parameters",
    "moved_to_xla_after_the_first_step",
]


@pytest.fixture(scope="module")
def two(launch):
    return launch("xla", CASES, 2)


def test_torch_still_returns_an_unreduced_xla_tensor_from_gloo_without_an_error(two):
    # The reason for the way through the host; when this fails, torch has learnt it or refuses it.
    assert [facts["value"] for facts in two.of("torch_does_not_reduce_xla_over_gloo")] == [[1, 1], [1, 1]]


def test_ranks_train_on_xla_to_what_one_process_trains_to_on_the_cpu(two):
    for facts in two.of("trains_as_one_process"):
        assert facts["device"] == "xla:0"
        assert facts["fell"] > 0.01
        assert facts["loss"] < 1e-6
        assert facts["state"] < 1e-6
        assert facts["ranks"] == 0


def test_parameters_and_buffers_are_those_of_rank_0(two):
    for facts in two.of("starts_from_rank_0_and_follows_its_buffers"):
        assert facts["parameters"] == 0
        assert facts["apart"] > 0
        assert facts["together"] == 0


def test_a_lazy_module_materialises_on_xla_alike_on_every_rank(two):
    for facts in two.of("lazy_module"):
        assert facts == {"device": "xla:0", "parameters": 0, "gradients": 0}


def test_gradients_of_no_sync_stay_local_and_are_averaged_afterwards(two):
    for facts in two.of("accumulates_without_sync"):
        assert facts["apart_inside"] > 1e-3
        assert facts["grad"] < 1e-6


def test_a_rank_without_a_gradient_counts_as_zero(two):
    for facts in two.of("ranks_use_different_parameters"):
        assert facts == {"left": 1.0, "right": 1.0, "never": None}


def test_a_module_moved_to_xla_between_steps_goes_on_training_as_one_process(two):
    for facts in two.of("moved_to_xla_after_the_first_step"):
        assert facts["device"] == "xla:0"
        assert facts["state"] < 1e-6

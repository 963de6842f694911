"""`replicate` over gloo with real processes: two launches of torchrun, asked by many tests."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(400)

ON_TWO = [
    "trains_as_one_process",
    "trains_through_the_host",
    "starts_from_rank_0",
    "buffers_follow_rank_0",
    "lazy_module",
    "accumulates_without_sync",
    "one_rank_evaluates",
    "ranks_use_different_parameters",
    "unused_parameters_are_named",
    "moved_after_the_first_step",
    "moved_by_stock_torch",
    "unfrozen_later",
    "left_to_others",
    "sparse_and_bucket_views",
    "modules_differ",
    "a_rank_leaves_the_loop",
    "a_rank_dies",
]
ON_FOUR = ["trains_as_one_process", "accumulates_without_sync", "two_groups", "modules_differ", "a_rank_stays_away"]


@pytest.fixture(scope="module")
def two(launch):
    return launch("gloo", ON_TWO, 2)


@pytest.fixture(scope="module")
def four(launch):
    return launch("gloo", ON_FOUR, 4)


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_ranks_train_to_what_one_process_trains_to(ranks, request):
    for facts in request.getfixturevalue(ranks).of("trains_as_one_process"):
        assert facts["fell"] > 0.1
        assert facts["loss"] < 1e-6
        assert facts["state"] < 1e-6


def test_gradients_that_pass_through_the_host_train_to_the_same(two):
    for facts in two.of("trains_through_the_host"):
        assert facts["loss"] < 1e-6
        assert facts["state"] < 1e-6
        assert (facts["left"], facts["right"], facts["never"]) == (1, 1, None)
        assert facts["left_before"] == 0.5


def test_parameters_and_buffers_start_as_those_of_rank_0_frozen_ones_too(two):
    assert [facts["state"] for facts in two.of("starts_from_rank_0")] == [0, 0]


def test_buffers_of_every_forward_pass_start_as_those_of_rank_0(two):
    for facts in two.of("buffers_follow_rank_0"):
        assert facts["apart"] > 0
        assert facts["together"] == 0
    assert two.of("buffers_follow_rank_0")[0]["rank_0"] == 0


def test_a_lazy_module_is_replicated_before_it_has_shapes_with_its_optimizer(two):
    for facts in two.of("lazy_module"):
        assert facts["same_object"]
        assert facts["in_features"] == 6
        assert facts["state"] < 1e-6


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_gradients_of_no_sync_stay_local_and_are_averaged_afterwards(ranks, request):
    for facts in request.getfixturevalue(ranks).of("accumulates_without_sync"):
        assert facts["apart_inside"] > 1e-3
        assert facts["grad"] < 1e-6


def test_one_rank_can_evaluate_on_its_own_inside_no_sync(two):
    assert all(facts["done"] for facts in two.of("one_rank_evaluates"))


def test_with_find_unused_parameters_a_rank_without_a_gradient_counts_as_zero(two):
    for facts in two.of("ranks_use_different_parameters"):
        assert facts == {"left": 1.0, "right": 1.0, "never": None}


def test_without_find_unused_parameters_the_next_forward_pass_names_the_unused(two):
    for facts in two.of("unused_parameters_are_named"):
        assert facts["names"] == ["right.weight", "right.bias", "never.weight", "never.bias"]


def test_a_module_moved_between_steps_goes_on_training_as_one_process(two):
    for facts in two.of("moved_after_the_first_step"):
        assert facts["dtype"] == "torch.float64"
        assert facts["state"] < 1e-6


def test_parameters_replaced_by_a_stock_conversion_are_averaged_too(two):
    for facts in two.of("moved_by_stock_torch"):
        assert facts["ranks"] == 0
        assert facts["state"] < 1e-6


def test_a_layer_unfrozen_between_steps_is_averaged_too(two):
    for facts in two.of("unfrozen_later"):
        assert facts["state"] < 1e-6


def test_only_what_nobody_else_manages_is_averaged_and_that_once(two):
    for facts in two.of("left_to_others"):
        assert facts["kept"] == facts["inner"] == facts["shared_with_ignored"] == 0
        assert facts["ignored"] > 0


def test_sparse_gradients_and_gradients_in_buckets_equal_those_of_one_process(two):
    for facts in two.of("sparse_and_bucket_views"):
        assert facts["layout"] == "torch.sparse_coo"
        assert facts["sparse"] < 1e-6
        assert facts["viewed"] < 1e-6


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_ranks_that_hold_different_modules_all_say_so(ranks, request):
    for facts in request.getfixturevalue(ranks).of("modules_differ"):
        assert facts["rank"] == 1
        assert facts["name"] == "1.weight"
        assert "(3, 3)" in facts["why"]
        assert "(2, 3) torch.float32 on cpu, trained on rank 0" in facts["why"]


def test_a_smaller_group_averages_over_its_own_ranks(four):
    assert [facts["grad"] for facts in four.of("two_groups")] == [0.5, 0.5, 2.5, 2.5]


def test_a_rank_outside_of_the_group_is_refused(four):
    assert all("no member of process_group" in facts["outside"] for facts in four.of("two_groups"))


def test_a_rank_that_never_comes_ends_the_others_in_bounded_time_and_is_named(four):
    facts = four.of("a_rank_stays_away")
    assert all("did not answer" in found["text"] for found in facts[:3])
    assert "Ranks 3" in facts[0]["text"] or "[3]" in facts[0]["text"]
    assert all(found["seconds"] < 20 for found in facts)


def test_a_rank_that_leaves_the_training_loop_ends_the_others_in_bounded_time(two):
    waiting = two.of("a_rank_leaves_the_loop")[0]
    assert "rank 0 of 2 could not go on with averaging gradients" in waiting["text"]
    assert 2 < waiting["seconds"] < 20


def test_a_rank_that_dies_ends_the_others_at_once_with_a_clear_error(two):
    (survivor,) = two.of("a_rank_dies", 0)
    said = "rank 0 of 2 could not go on with averaging gradients, because another rank did not answer"
    assert "RankLostError" in survivor["text"]
    assert said in survivor["text"]
    assert survivor["seconds"] < 20
    assert two.code != 0

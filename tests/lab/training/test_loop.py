import pytest
import torch
from closeness import assert_close
from torch import nn

from tidegate.lab.training.loop import take_step, train, warmup_and_linear_decay


@pytest.fixture
def weight():
    return nn.Parameter(torch.tensor([3.0, 4.0]))


def half_square(weight):
    """Its gradient is the weight itself."""
    return (weight**2).sum() / 2


def test_a_step_tells_loss_and_norms_from_before_it_and_clips_the_gradient(weight):
    optimizer = torch.optim.SGD([weight], lr=0.5)
    figures = take_step(map(half_square, [weight]), optimizer, share=1.0, clip=1.0, parameters=[weight], gates=[weight])
    assert figures == (12.5, 5.0, 5.0)
    assert_close(weight.detach(), torch.tensor([3.0, 4.0]) * (1 - 0.5 / 5))


def test_a_gradient_that_is_not_clipped_is_left_as_it_is_though_its_norm_is_infinite():
    weights = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    scale = torch.tensor([float("inf"), 0.5])
    figures = take_step(iter([(scale * weights).sum()]), optimizer, share=1.0, clip=None, parameters=[weights])
    assert figures.norm == float("inf")
    assert weights[1] == 0.5


def test_the_share_is_of_the_rate_that_each_group_was_made_with(weight):
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [other], "lr": 0.25}])
    for share in (0.5, 0.5, 1.0):
        take_step(map(half_square, [weight]), optimizer, share=share, clip=None, parameters=[weight])
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * share, 0.25 * share]


def test_the_parts_of_a_loss_are_made_one_after_another_and_add_up(weight):
    made = []

    def parts():
        for share in (0.25, 0.75):
            # The gradients of the part before are there when the next is made.
            made.append(weight.grad.clone() if weight.grad is not None else None)
            yield share * half_square(weight)

    figures = take_step(parts(), torch.optim.SGD([weight], lr=0.5), share=1.0, clip=None, parameters=[weight])
    assert figures[:2] == (12.5, 5.0)
    assert made[0] is None
    assert_close(made[1], 0.25 * torch.tensor([3.0, 4.0]))
    assert_close(weight.detach(), 0.5 * torch.tensor([3.0, 4.0]))


def test_training_makes_one_step_a_batch_by_the_schedule(weight):
    optimizer, start = torch.optim.SGD([weight], lr=1.0), weight.detach().clone()
    train(
        lambda batch: (batch * weight).sum(),
        optimizer,
        [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])],
        schedule=lambda step: 0.25 * (step + 1),
        clip=None,
    )
    assert_close(weight.detach(), start - torch.tensor([0.25, 0.5]))


def test_the_schedule_rises_over_the_warmup_and_falls_towards_zero():
    schedule = warmup_and_linear_decay(100, warmup=10)
    assert [schedule(0), schedule(9), schedule(50)] == pytest.approx([0.1, 0.91, 0.5])
    assert 0 < schedule(99) < 0.02

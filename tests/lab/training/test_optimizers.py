import pytest
import torch
from closeness import assert_close
from lab_runs import model_of, run_of
from torch import nn

from tidegate.config import VisionConfig
from tidegate.gate import PRESETS
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.model import build_model
from tidegate.lab.training.optimizers import hidden_matrices, make_optimizer
from tidegate.lab.training.train import train_step
from tidegate.torch.gate import gate_parameters

EVERYTHING = {"bias": True, "qk_norm": True, "metric": "learned", "positions": "learned", "tie_embeddings": False}


def run_with(model, **training):
    return run_of(RecallTask(), model=model, optimizer="muon", **training)


def names_by_group(model, run):
    names = {weight: name for name, weight in model.named_parameters()}
    return [{names[weight] for weight in group["params"]} for group in make_optimizer(model, run).param_groups]


class TestWhatMuonUpdates:
    @pytest.mark.parametrize("gate", [*PRESETS, "output:query:silu:r2", "g1+g2+g5"])
    def test_are_the_linear_maps_inside_blocks_and_nothing_else(self, gate):
        model = build_model(model_of(gate, **EVERYTHING))
        muon, *others = names_by_group(model, run_with(model.config))
        assert muon == {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
        assert len(muon) == 2 * 7
        by_adamw = set().union(*others)
        assert muon | by_adamw == {name for name, _ in model.named_parameters()}
        assert len(by_adamw) == sum(map(len, others)), "a parameter in two groups would be updated twice"
        gates = set(gate_parameters(model))
        assert not gates & set(hidden_matrices(model))

    def test_in_a_classifier_of_images_the_patches_and_the_head_are_no_hidden_matrices(self):
        model = build_model(VisionConfig(gate="g1", d_model=16, num_layers=1, num_heads=2, image_size=8))
        assert all("blocks." in name for name in names_by_group(model, run_with(model.config))[0])


def batch_of(model):
    tokens = torch.randint(model.config.vocab_size, (4, 9), generator=torch.Generator().manual_seed(0))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def test_its_steps_are_those_of_pytorchs_own_two_optimisers():
    config = model_of("g1")
    run = run_with(config, steps=3, clip=1e9)
    model, twin = build_model(config, seed=0), build_model(config, seed=0)
    optimizer = make_optimizer(model, run)
    matrices = [module.weight for module in twin.stack.modules() if isinstance(module, nn.Linear)]
    gates = list(gate_parameters(twin))
    rest = [weight for weight in twin.parameters() if all(weight is not other for other in (*matrices, *gates))]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [weight for weight in rest if weight.ndim > 1], "weight_decay": 0.1},
            {"params": [*gates, *(weight for weight in rest if weight.ndim < 2)], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(3):
        train_step(model, optimizer, batch_of(model), run, step)
        for part in (muon, adamw):
            part.zero_grad()
            for group in part.param_groups:
                group["lr"] = 1e-2 * run.training.lr_share(step)
        logits = twin(batch_of(twin).inputs)
        nn.functional.cross_entropy(logits.flatten(0, 1), batch_of(twin).targets.flatten()).backward()
        muon.step()
        adamw.step()
    for name, weight in twin.named_parameters():
        assert_close(model.get_parameter(name).detach(), weight.detach())

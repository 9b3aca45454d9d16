"""EAGLE-1 and HASS: the loss by its formula, which gradients flow, what is saved."""

import pytest
import torch

from headtrain import checkpoint
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target


@pytest.fixture(scope="module")
def target():
    return make_target()


def formula(head, target, batch, passes, token_weight, feature_weight):
    """Smooth L1 to h_{t+1} and cross entropy with p_{t+1}, for every slot whose predicted token x_{t+2+k} is trained."""
    total = 0.0
    rows = head.target_rows()
    for k, f in enumerate(head.unroll(batch, passes, detach=True)):
        for b, t in torch.cartesian_prod(torch.arange(len(f)), torch.arange(f.shape[1])).tolist():
            if t + 2 + k >= batch.input_ids.shape[1] or not batch.loss_mask[b, t + 2 + k]:
                continue
            aim = batch.hidden[b, t + 1 + k]
            p = torch.softmax(rows @ aim, -1)
            log_q = torch.log_softmax(rows @ f[b, t], -1)
            distance = torch.nn.functional.smooth_l1_loss(f[b, t], aim)
            total = total + feature_weight * distance - token_weight * (p * log_q).sum()
    return total


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
@pytest.mark.parametrize("passes", [1, 3])
def test_loss_is_the_formula(target, passes, vocabulary):
    head = make_head("eagle1", target, vocabulary, passes=passes, token_weight=0.3, feature_weight=0.7).train()
    mask = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    batch = make_batch(head, target, length=10, mask=mask)
    out = head.loss(batch, target)
    expected = formula(head, target, batch, passes, 0.3, 0.7)
    torch.testing.assert_close(out.total, expected, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(out.total, list(head.parameters()))
    wanted = torch.autograd.grad(formula(head, target, batch, passes, 0.3, 0.7), list(head.parameters()))
    for (name, _), a, b in zip(head.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_passes_train_by_themselves(target):
    """HASS adds up the gradients of its passes: none flows back through the state that is fed back."""
    head = make_head("eagle1", target, passes=2).train()
    batch = make_batch(head, target)
    first, second = head.unroll(batch, 2, detach=True)
    assert torch.autograd.grad(second.sum(), first, allow_unused=True)[0] is None
    first, second = head.unroll(batch, 2)
    assert torch.autograd.grad(second.sum(), first)[0] is not None  # control: without detach it would


def test_the_likeliest_tokens_add_their_part(target):
    without, with_top = (make_head("eagle1", target, top_weight=weight) for weight in (0.0, 1.0))
    batch = make_batch(without, target)
    with torch.no_grad():
        assert float(with_top.loss(batch, target).total) > float(without.loss(batch, target).total)


def test_saved_names(target, tmp_path):
    head = make_head("eagle1", target)
    assert set(head.state_dict()) == {
        "fc.weight",
        "fc.bias",
        "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    checkpoint.save_head(tmp_path / "head", head, "eagle1", target)
    again = checkpoint.load_head(tmp_path / "head", target)
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))

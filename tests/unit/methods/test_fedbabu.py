"""FedBABU (4.7): the head is the initial one until fine-tuning, which is plain SGD on what `tuned` says."""

import torch
from helpers import play, prepare, settings
from naive import flat, module_of, rows_of, train_epochs


def test_the_head_is_the_initial_one_until_fine_tuning():
    it = play(settings("fedbabu", evaluate={"protocol": ["personal", "ft(2)"]}, train={"weight_decay": 1e-2}))
    head = it.made.messages.head
    for k in it.fed.states.rows:
        assert torch.equal(it.kept(k)._w, head.take(it.w0))
    assert torch.equal(head.take(it.w), head.take(it.w0))
    last = it.rows[-1]
    assert last["ft(2)_loss"] != last["personal_loss"]
    assert "ft(2)_loss" not in it.rows[0]


def test_fine_tuning_by_hand(client_of):
    """ft(2) at client 3: two epochs of SGD on cross-entropy, a fresh optimiser, the last round's rate."""
    it = prepare(settings("fedbabu", train={"schedule": "exponential", "decay": 0.5, "weight_decay": 1e-3}))
    module, client = module_of(it), client_of(it, 3, round_=2)
    train_epochs(module, rows_of(it, 3), (2, 3, 0), 0.05 / 4, 2, weight_decay=1e-3)
    client.fine_tune(2)
    torch.testing.assert_close(client.w, flat(module), rtol=0, atol=1e-6)


def test_fine_tuning_trains_in_training_mode_whoever_was_evaluated_before(client_of):
    """Dropout draws and batch statistics move, from the client's own random numbers."""
    it = prepare(settings("fedbabu", "norm"))

    def tuned():
        client = client_of(it, 2)
        it.made.net.module.eval()  # as the evaluation of another client leaves it
        torch.manual_seed(torch.seed())
        client.fine_tune(1)
        return client.w.clone(), client.b.clone(), client.b0

    (w, b, b0), (again, b_again, _) = tuned(), tuned()
    assert torch.equal(w, again)
    assert torch.equal(b, b_again)
    assert not torch.equal(b, b0)

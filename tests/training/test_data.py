import torch

from aorta.training.setup import SyntheticTokens


def tokens(seed=0, dp_rank=0, vocab_size=32):
    return SyntheticTokens(vocab_size, seq_len=6, batch_size=3, seed=seed, dp_rank=dp_rank)


def test_a_batch_depends_on_seed_rank_step_and_micro_batch_alone():
    first = tokens().batch(4, 1)
    assert torch.equal(first, tokens().batch(4, 1))
    others = [tokens(seed=1).batch(4, 1), tokens(dp_rank=1).batch(4, 1), tokens().batch(5, 1)]
    assert not any(torch.equal(first, other) for other in [*others, tokens().batch(4, 0)])


def test_each_token_decides_the_next():
    following: dict[int, int] = {}
    source = tokens()
    for step in range(20):
        for row in source.batch(step, 0).tolist():
            for token, after in zip(row, row[1:], strict=False):
                assert following.setdefault(token, after) == after


def test_tokens_are_in_the_vocabulary():
    batch = tokens(vocab_size=100_000).batch(0, 0)
    assert batch.shape == (3, 7)
    assert batch.min() >= 0
    assert batch.max() < 100_000

"""Lengths of Fourier transforms that a large prime divides."""

import pytest
import torch

from aorta.attach.fourier_lengths import NAMES, FourierLengths, largest_prime

PRIME = 101
ROWS = 4


@pytest.mark.parametrize(
    ("number", "prime"), [(1, 1), (2, 2), (1024, 2), (20_799, 2_311), (8_191, 8_191), (6 * 49, 7)]
)
def test_the_largest_prime_that_divides_a_number(number, prime):
    assert largest_prime(number) == prime


def noted(call, steps=3):
    of = FourierLengths()
    before = {name: getattr(torch.fft, name) for name in NAMES}
    for _ in range(steps):
        of.begin()
        call()
        of.end()
    after = {name: getattr(torch.fft, name) for name in NAMES}
    assert before == after
    return of.found()


def halved():
    """What rfft gives of a row of twice the prime."""
    return torch.zeros(ROWS, PRIME + 1, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("call", "length"),
    [
        (lambda: torch.fft.rfft(torch.zeros(ROWS, PRIME)), PRIME),
        (lambda: torch.fft.fft(torch.zeros(PRIME, 8), dim=0), PRIME),
        (lambda: torch.fft.fft(input=torch.zeros(ROWS, 64), n=2 * PRIME), 2 * PRIME),
        (lambda: torch.fft.rfft(torch.zeros(ROWS, PRIME), 64), None),
        (lambda: torch.fft.irfft(halved()), 2 * PRIME),
        (lambda: torch.fft.irfft(halved(), n=64), None),
        (lambda: torch.fft.rfft2(torch.zeros(ROWS, PRIME, 64)), PRIME),
        (lambda: torch.fft.rfft2(torch.zeros(PRIME, 64, 64)), None),
        (lambda: torch.fft.fftn(torch.zeros(PRIME, 64)), PRIME),
        (lambda: torch.fft.irfftn(halved(), s=(4, 64)), None),
    ],
)
def test_lengths_that_functions_are_called_with(call, length):
    found = noted(call)
    assert (found and (found.num, found.length, found.prime)) == (length and (1, length, PRIME))
    assert length is None or found.at.file == __file__


def test_transforms_with_gradients_are_timed_forward():
    x = torch.rand(64, 2_311, requires_grad=True)

    def call():
        torch.fft.rfft(x.detach())
        torch.fft.irfft(torch.fft.rfft(x), n=2_311).sum().backward()

    found = noted(call)
    assert (found.num, found.length) == (3, 2_311)
    assert found.with_gradient == pytest.approx(2 / 3)
    assert found.ms > 0


def test_steps_that_were_cut_short_tell_nothing():
    of = FourierLengths()
    of.begin()
    torch.fft.rfft(torch.zeros(ROWS, PRIME))
    of.end(is_whole=False)
    assert of.found() is None


def test_what_fails_fails_as_it_does_without():
    of = FourierLengths()
    of.begin()
    with pytest.raises(RuntimeError, match="Invalid number of data points"):
        torch.fft.rfft(torch.zeros(0))
    with pytest.raises(TypeError):
        torch.fft.rfft()
    of.end()
    assert of.found() is None

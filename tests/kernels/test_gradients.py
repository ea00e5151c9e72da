"""What runs where a function with the gradients of another is differentiated."""

import jax

from pallas_kernels.autodiff import with_gradients_of


def test_only_the_twin_runs_where_it_is_differentiated():
    run = with_gradients_of(lambda x: x**3, lambda x: x**3 + 1.0)
    assert run(2.0) == jax.jit(run)(2.0) == 9.0
    assert jax.value_and_grad(run)(2.0) == (8.0, 12.0)
    assert jax.jvp(run, (2.0,), (1.0,)) == (8.0, 12.0)
    assert jax.grad(jax.grad(run))(2.0) == 12.0
